"""The shape and the switches of one transformer."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.config.base import BelowOne, Fraction, InputError, component

Activation = Literal["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu"]


@component
class ModelConfig:
    """Architecture. Defaults are GPT-2's; LLaMA, BLOOM and Mixtral differ by switches (see `configs/models/`)."""

    family: Literal["gpt", "bert", "t5"] = "gpt"
    """Decoder, encoder (BERT, RoBERTa), or both (T5)."""
    num_layers: PositiveInt = 12
    """L, transformer blocks (t5: of the decoder)."""
    encoder_layers: PositiveInt | None = None
    """t5: blocks of the encoder; unset = num_layers."""
    hidden_size: PositiveInt = 768
    """D, width of the residual stream."""
    num_heads: PositiveInt = 12
    """N, query heads."""
    num_kv_heads: int | None = None
    """K, key/value heads (Megatron: query groups); unset = num_heads (no grouping)."""
    head_dim: PositiveInt | None = None
    """H, width of one head (Megatron: kv channels); unset = hidden_size / num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """F, width of the MLP; unset = 4 D, or int(8 D / 3 / 64) * 64 where it is gated (Megatron's rule)."""
    max_positions: PositiveInt = 1024
    """Longest sequence the model can see; rows of the position table when positions are learned."""
    vocab_size: PositiveInt | None = None
    """Vocabulary that counts; unset = the tokenizer's. Padding rows are added after it, never counted."""
    vocab_multiple: PositiveInt = 128
    """Rows of the embedding table are padded to a multiple of this, and of pipe x tensor."""
    positions: Literal["learned", "rope", "alibi", "relative", "none"] = "learned"
    """How a token knows its place: a learned table, rotary embedding, distances that lower the attention (alibi), a
    learned bias of distances (relative: t5), or not at all."""
    position_offset: NonNegativeInt = 0
    """Rows of the learned table before that of the first position (RoBERTa: 2)."""
    rope_base: PositiveFloat = 10_000.0
    """Theta of the rotary embedding."""
    rope_fraction: Fraction = 1.0
    """Share of each head that is rotated (Megatron: rotary percent)."""
    rope_scaling_factor: PositiveFloat | None = None
    """LLaMA 3.1: long waves of the rotary embedding turn this many times slower, for a longer context; unset = off."""
    rope_low_frequency: PositiveFloat = 1.0
    """Waves that turn less often than this within the original context are slowed down fully."""
    rope_high_frequency: PositiveFloat = 4.0
    """Waves that turn more often than this within it are left alone."""
    rope_original_positions: PositiveInt = 8192
    """Context that the model was first trained with."""
    relative_buckets: PositiveInt = 32
    """t5: distances told apart."""
    relative_max_distance: PositiveInt = 128
    """t5: distances from here on share a bucket."""
    window: PositiveInt | None = None
    """Sliding window (Mistral): a token sees itself and the window - 1 tokens before it; unset = all before it."""
    attention_scale: PositiveFloat | None = None
    """Factor of the attention scores; unset = 1 / sqrt(H)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Normalise the input of a branch, or the sum after it (the first BERT); then there is no norm before the head."""
    embedding_norm: bool = False
    """Normalise the embedding as well (BLOOM, the first BERT)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside the norm."""
    activation: Activation = "gelu"
    """MLP non-linearity: GELU in its tanh form, GELU, ReLU, its square (2109.08668), or a unit gated by SiLU or (tanh)
    GELU, which has two input matrices."""
    bias: bool = True
    """Biases on every linear layer."""
    qkv_bias: bool | None = None
    """Bias on the query/key/value projection; unset = bias."""
    qk_norm: bool = False
    """Normalise each query and key head before the rotary embedding."""
    tied_head: bool = True
    """Use the token embedding as the output matrix."""
    head_activation: Literal["gelu", "gelu_exact", "relu"] | None = None
    """bert: non-linearity of the head that restores masked tokens (Megatron-LM's BERT: gelu_exact); unset =
    activation."""
    token_types: NonNegativeInt = 0
    """bert: kinds of tokens that have an embedding (first or second part of a pair); 0 = none."""
    pair_task: bool = False
    """bert: learn which part of a pair comes first as well (Megatron's sentence order), from a pooled first token."""
    experts: NonNegativeInt = 0
    """E, MLPs of every layer of which each token uses some (a mixture); 0 = one MLP for all."""
    experts_per_token: PositiveInt = 2
    """k, those that a token uses."""
    expert_ffn_size: PositiveInt | None = None
    """F of an expert; unset = ffn_hidden_size."""
    shared_ffn_size: NonNegativeInt = 0
    """F of an MLP beside the experts that all tokens use; 0 = none."""
    shared_gate: bool = False
    """Weigh the shared MLP by a learned sigmoid of the token (Qwen)."""
    router_renormalize: bool = True
    """Weights of a token's k experts sum to 1 (Mixtral); off: their share of the softmax over all experts."""
    balance_loss: NonNegativeFloat = 0.0
    """Factor of the loss that spreads the tokens of a sequence over the experts."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the loss that keeps the router's logits small."""
    attention_dropout: BelowOne = 0.0
    """Dropout rate on attention probabilities."""
    hidden_dropout: BelowOne = 0.0
    """Dropout rate on the embedding and on every branch before it joins the residual stream."""
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial weights; output layers use init_std / sqrt(2 L)."""

    @property
    def position_rows(self) -> int:
        """P, rows of a learned table of positions."""
        return self.max_positions + self.position_offset

    @property
    def kv_heads(self) -> int:
        """K after the default."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """H after the default."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two input matrices."""
        return self.activation in ("swiglu", "geglu")

    @property
    def expert_size(self) -> int:
        """F of an expert after the default."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def ffn_size(self) -> int:
        """F after the default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query/key/value projection has a bias, after the default."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def padded_vocab_size(self) -> NonNegativeInt:
        """V, rows of the embedding table; those past `vocab_size` take part in nothing."""
        if self.vocab_size is None:
            raise InputError("model.vocab_size is not known yet: set it or give a tokenizer")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
