"""The shape and the switches of one decoder-only transformer."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.config.base import BelowOne, ConfigError, Fraction, component


@component
class ModelConfig:
    """Architecture. Defaults are GPT-2's; LLaMA differs by switches (see `configs/models/`)."""

    num_layers: PositiveInt = 12
    """L, transformer blocks."""
    hidden_size: PositiveInt = 768
    """D, width of the residual stream."""
    num_heads: PositiveInt = 12
    """N, query heads."""
    num_kv_heads: int | None = None
    """K, key/value heads (Megatron: query groups); unset = num_heads (no grouping)."""
    head_dim: PositiveInt | None = None
    """H, width of one head (Megatron: kv channels); unset = hidden_size / num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """F, width of the MLP; unset = 4 D, or int(8 D / 3 / 64) * 64 for swiglu (Megatron's rule)."""
    max_positions: PositiveInt = 1024
    """Longest sequence the model can see; rows of the position table when positions are learned."""
    vocab_size: PositiveInt | None = None
    """Vocabulary that counts; unset = the tokenizer's. Padding rows are added after it, never counted."""
    vocab_multiple: PositiveInt = 128
    """Rows of the embedding table are padded to a multiple of this, and of pipe x tensor."""
    positions: Literal["learned", "rope", "none"] = "learned"
    """How a token knows its place: a learned table, rotary embedding, or not at all."""
    rope_base: PositiveFloat = 10_000.0
    """Theta of the rotary embedding."""
    rope_fraction: Fraction = 1.0
    """Share of each head that is rotated (Megatron: rotary percent)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside the norm."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """MLP non-linearity: tanh-approximated GELU, or SiLU-gated linear unit (two input matrices)."""
    bias: bool = True
    """Biases on every linear layer."""
    qkv_bias: bool | None = None
    """Bias on the query/key/value projection; unset = bias."""
    qk_norm: bool = False
    """Normalise each query and key head before the rotary embedding."""
    tied_head: bool = True
    """Use the token embedding as the output matrix."""
    attention_dropout: BelowOne = 0.0
    """Dropout rate on attention probabilities."""
    hidden_dropout: BelowOne = 0.0
    """Dropout rate on the embedding and on every branch before it joins the residual stream."""
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial weights; output layers use init_std / sqrt(2 L)."""

    @property
    def kv_heads(self) -> int:
        """K after the default."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """H after the default."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """F after the default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
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
            raise ConfigError("model.vocab_size is not known yet: set it or give a tokenizer")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
