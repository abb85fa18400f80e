"""Configuration of a transformer: its shape and its switches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.config.base import BelowOne, Elsewhere, Fraction, InputError, component
from megajax.config.needs import Needs, refuse_ignored, require_multiple

Activation = Literal["gelu", "gelu_exact", "relu", "squared_relu", "swiglu", "geglu"]
LayerKind = Literal["local", "global"]
POSITIONS = {"gpt": ("learned", "rope", "alibi", "none"), "bert": ("learned",), "t5": ("relative",)}
"""Family -> the values of `model.positions` that it takes."""
SAMPLE_KINDS = {"gpt": ("gpt", "instruction"), "bert": ("bert",), "t5": ("t5",)}
"""Family -> the values of `data.kind` that it is trained on besides "auto", which stands for the family's own name."""
GPT = Needs("model.family", ("gpt",))
BERT = Needs("model.family", ("bert",))
T5 = Needs("model.family", ("t5",))
ROPE = Needs("model.positions", ("rope",))
PATTERN = Needs("model.layer_pattern")
SCALED_ROPE = Needs("model.rope_scaling_factor")
MIXTURE = Needs("model.experts")


@component
class ModelConfig:
    """The architecture: GPT-2 by default, and by switches LLaMA, BLOOM, Mixtral, ... (`configs/models/`)."""

    family: Literal["gpt", "bert", "t5"] = "gpt"
    """Kind of transformer: a decoder (gpt), an encoder (bert: BERT, RoBERTa), or both (t5)."""
    num_layers: Annotated[PositiveInt, Elsewhere("num_hidden_layers n_layer n_layers decoder_num_layers")] = 12
    """Number of transformer blocks, L; in t5, of the decoder."""
    encoder_layers: Annotated[PositiveInt | None, T5, Elsewhere("encoder_num_layers")] = None
    """t5: number of blocks of the encoder; unset = num_layers."""
    hidden_size: Annotated[PositiveInt, Elsewhere("n_embd d_model dim")] = 768
    """Width of the residual stream, D."""
    num_heads: Annotated[PositiveInt, Elsewhere("num_attention_heads n_head n_heads")] = 12
    """Number of query heads, N."""
    num_kv_heads: Annotated[
        int | None, Elsewhere("num_query_groups num_key_value_heads n_kv_heads group_query_attention")
    ] = None
    """Number of key/value heads, K (Megatron: query groups); unset = num_heads, so that no heads are grouped."""
    head_dim: Annotated[PositiveInt | None, Elsewhere("kv_channels")] = None
    """Width of one head, H (Megatron: kv channels); unset = hidden_size / num_heads."""
    ffn_hidden_size: Annotated[PositiveInt | None, Elsewhere("intermediate_size n_inner")] = None
    """Width of the MLP, F; unset = 4 D, or int(8 D / 3 / 64) * 64 where it is gated (Megatron's rule)."""
    max_positions: Annotated[PositiveInt, Elsewhere("max_position_embeddings n_positions n_ctx")] = 1024
    """Length of the longest sequence that the model can see, and rows of the position table if positions are
    learned."""
    vocab_size: PositiveInt | None = None
    """Number of ids in the vocabulary; unset = the tokenizer's. Rows that pad the table come after them and never
    count."""
    vocab_multiple: Annotated[PositiveInt, Elsewhere("make_vocab_size_divisible_by")] = 128
    """Number to a multiple of which the rows of the embedding table are padded, and of pipe x tensor as well."""
    positions: Annotated[
        Literal["learned", "rope", "alibi", "relative", "none"],
        Elsewhere("position_embedding_type use_rotary_position_embeddings=rope no_position_embedding=none"),
    ] = "learned"
    """Encoding of positions: a learned table, the rotary embedding (rope), distances that lower the attention (alibi),
    a learned bias of distances (relative: t5), or none."""
    position_offset: Annotated[NonNegativeInt, BERT] = 0
    """Number of rows of the learned table before that of the first position (RoBERTa: 2)."""
    rope_base: Annotated[PositiveFloat, ROPE, Elsewhere("rotary_base rope_theta")] = 10_000.0
    """Base (theta) of the rotary embedding."""
    rope_local_base: Annotated[PositiveFloat | None, ROPE, PATTERN, Elsewhere("rope_local_base_freq")] = None
    """Base of the rotary embedding in local layers (`layer_pattern`), whose waves are never slowed down (Gemma 3);
    unset = rope_base."""
    rope_fraction: Annotated[Fraction, ROPE, Elsewhere("rotary_percent partial_rotary_factor")] = 1.0
    """Share of each head that is rotated (Megatron: rotary percent)."""
    rope_scaling_factor: Annotated[PositiveFloat | None, ROPE, Elsewhere("rope_scaling use_rope_scaling=8")] = None
    """Factor by which long waves of the rotary embedding turn slower, for a longer context (LLaMA 3.1); unset = off."""
    rope_low_frequency: Annotated[PositiveFloat, SCALED_ROPE] = 1.0
    """Turns within the original context below which a wave is slowed down by the whole factor."""
    rope_high_frequency: Annotated[PositiveFloat, SCALED_ROPE] = 4.0
    """Turns within the original context above which a wave is left alone."""
    rope_original_positions: Annotated[PositiveInt, SCALED_ROPE] = 8192
    """Length of the context that the model was first trained with."""
    relative_buckets: Annotated[PositiveInt, T5, Elsewhere("relative_attention_num_buckets")] = 32
    """t5: number of buckets of distances that the bias tells apart."""
    relative_max_distance: Annotated[PositiveInt, T5, Elsewhere("relative_attention_max_distance")] = 128
    """t5: distance from which on all distances share a bucket."""
    window: Annotated[PositiveInt | None, GPT, Elsewhere("sliding_window window_size")] = None
    """Number of tokens that a token sees, itself included (sliding window: Mistral); unset = all tokens before it."""
    layer_pattern: Annotated[tuple[LayerKind, ...], GPT, Needs("model.window"), Elsewhere("layer_types")] = ()
    """Kinds of the first layers, which repeat from there on: local layers have the window, global ones see all tokens
    before them (Gemma 2: local, global); empty = all layers are alike."""
    attention_scale: Annotated[PositiveFloat | None, Elsewhere("softmax_scale")] = None
    """Factor of the attention scores; unset = 1 / sqrt(H)."""
    attention_softcap: Annotated[PositiveFloat | None, GPT, Elsewhere("attn_logit_softcapping")] = None
    """Cap c of the attention scores s, which become c tanh(s / c) (Gemma 2); unset = no cap."""
    logit_softcap: Annotated[PositiveFloat | None, GPT, Elsewhere("final_logit_softcapping")] = None
    """Cap c of the logits, which become c tanh(logit / c) (Gemma 2); unset = no cap."""
    norm: Annotated[Literal["layernorm", "rmsnorm"], Elsewhere("normalization")] = "layernorm"
    """Normalisation before attention, MLP and head."""
    norm_plus_one: Annotated[bool, Elsewhere("apply_layernorm_1p=true")] = False
    """Let norms scale by 1 + their weights, which start at 0 (Gemma; Megatron-LM: layernorm 1p)."""
    branch_norm: Annotated[bool, GPT] = False
    """Normalise the output of attention and MLP as well, before it joins the residual stream (Gemma 2)."""
    norm_placement: Annotated[Literal["pre", "post"], BERT] = "pre"
    """Place of a branch's norm: at the input of the branch (pre), or at the sum behind it (post, as in the first BERT),
    where no norm comes before the head."""
    embedding_scale: Annotated[bool, GPT] = False
    """Multiply the embedding by sqrt(D), rounded to the precision of the computation (Gemma)."""
    embedding_norm: bool = False
    """Normalise the embedding as well (BLOOM, the first BERT)."""
    norm_eps: Annotated[PositiveFloat, Elsewhere("norm_epsilon layernorm_epsilon layer_norm_epsilon rms_norm_eps")] = (
        1e-5
    )
    """Number that is added to the variance in a norm."""
    activation: Annotated[
        Activation, Elsewhere("swiglu=swiglu squared_relu=squared_relu hidden_act activation_function")
    ] = "gelu"
    """Non-linearity of the MLP: GELU in its tanh form (gelu) or exact (gelu_exact), ReLU, its square (2109.08668), or a
    unit with two input matrices that is gated by SiLU (swiglu) or tanh GELU (geglu)."""
    bias: Annotated[bool, Elsewhere("disable_bias_linear=false add_bias_linear")] = True
    """Whether every linear layer has a bias."""
    qkv_bias: Annotated[bool | None, Elsewhere("add_qkv_bias=true")] = None
    """Give the query/key/value projection a bias; unset = as bias says."""
    qk_norm: Annotated[bool, Elsewhere("qk_layernorm=true")] = False
    """Normalise each query and key head before the rotary embedding."""
    tied_head: Annotated[bool, Elsewhere("untie_embeddings_and_output_weights=false tie_word_embeddings")] = True
    """Use the token embedding as the output matrix."""
    head_activation: Annotated[Literal["gelu", "gelu_exact", "relu"] | None, BERT] = None
    """bert: non-linearity of the head that restores masked tokens (Megatron-LM's BERT: gelu_exact); unset =
    activation."""
    token_types: Annotated[NonNegativeInt, BERT, Elsewhere("type_vocab_size")] = 0
    """bert: number of kinds of tokens that have an embedding (first or second part of a pair); 0 = none."""
    pair_task: Annotated[bool, BERT, Elsewhere("bert_binary_head bert_no_binary_head=false")] = False
    """bert: learn as well which part of a pair comes first (Megatron's sentence order), from a pooled first token."""
    experts: Annotated[NonNegativeInt, Elsewhere("num_experts num_local_experts")] = 0
    """Number of experts, E: MLPs of a layer of which each token uses some (a mixture); 0 = one MLP for all tokens."""
    experts_per_token: Annotated[PositiveInt, MIXTURE, Elsewhere("moe_router_topk num_experts_per_tok")] = 2
    """Number of experts that a token uses, k."""
    expert_ffn_size: Annotated[PositiveInt | None, MIXTURE, Elsewhere("moe_ffn_hidden_size moe_intermediate_size")] = (
        None
    )
    """Width of an expert, F; unset = ffn_hidden_size."""
    dense_layers: Annotated[NonNegativeInt, MIXTURE, Elsewhere("first_k_dense_replace")] = 0
    """Number of first layers that have one MLP, of ffn_hidden_size, in the place of experts (DeepSeek)."""
    shared_ffn_size: Annotated[
        NonNegativeInt, MIXTURE, Elsewhere("moe_shared_expert_intermediate_size shared_expert_intermediate_size")
    ] = 0
    """Width of an MLP beside the experts that all tokens use; 0 = none."""
    shared_gate: Annotated[bool, Needs("model.shared_ffn_size"), Elsewhere("moe_shared_expert_gate=true")] = False
    """Weigh the shared MLP by a learned sigmoid of the token (Qwen)."""
    router_renormalize: Annotated[bool, MIXTURE, Elsewhere("norm_topk_prob moe_router_pre_softmax=false")] = True
    """Let the weights of a token's k experts sum to 1 (Mixtral); off = they are their share of the softmax over all
    experts."""
    balance_loss: Annotated[NonNegativeFloat, MIXTURE, Elsewhere("moe_aux_loss_coeff router_aux_loss_coef")] = 0.0
    """Factor of the loss that spreads the tokens of a sequence over the experts."""
    z_loss: Annotated[NonNegativeFloat, MIXTURE, Elsewhere("moe_z_loss_coeff")] = 0.0
    """Factor of the loss that keeps the router's logits small."""
    attention_dropout: BelowOne = 0.0
    """Dropout rate of the attention probabilities."""
    hidden_dropout: BelowOne = 0.0
    """Dropout rate of the embedding, and of every branch before it joins the residual stream."""
    init_std: Annotated[NonNegativeFloat, Elsewhere("init_method_std initializer_range")] = 0.02
    """Standard deviation of the initial weights; output layers use init_std / sqrt(2 L)."""

    def __post_init__(self) -> None:
        """Refuse what the family lacks or would ignore, and sizes that do not fit together."""
        refuse_ignored("model", self)
        self._check_family()
        self._check_sizes()
        if self.experts:
            self._check_experts()

    def _check_family(self) -> None:
        allowed = POSITIONS[self.family]
        if self.positions not in allowed:
            remedy = f"use {' or '.join(allowed)}"
            raise InputError(f"model.positions {self.positions} does not go with model.family {self.family}: {remedy}")
        if self.family == "bert" and not self.tied_head:
            raise InputError("model.tied_head: the head of bert is its embedding, leave it true")
        if self.family != "t5":
            return
        if self.kv_heads != self.num_heads:
            raise InputError(f"model.num_kv_heads is {self.num_kv_heads}: t5 has one per head, leave it unset")
        if self.bias or self.has_qkv_bias:
            raise InputError("model.bias: t5 has no biases, set model.bias=false")
        if self.embedding_norm:
            raise InputError("model.embedding_norm: t5 has none, set it to false")
        buckets, far = self.relative_buckets, self.relative_max_distance
        if buckets % 4 or far <= buckets // 2:
            raise InputError(
                f"model.relative_buckets {buckets} and relative_max_distance {far}: "
                "use a multiple of 4, and a distance of more than half of it"
            )

    def _check_sizes(self) -> None:
        n, k = self.num_heads, self.kv_heads
        if k < 1:
            raise InputError(f"model.num_kv_heads is {k}: use a divisor of model.num_heads {n}, or leave it unset")
        remedy = "every key/value head serves the same number of query heads"
        require_multiple("model.num_heads", n, "model.num_kv_heads", k, remedy)
        if self.head_dim is None:
            remedy = "change one of them, or set model.head_dim"
            require_multiple("model.hidden_size", self.hidden_size, "model.num_heads", n, remedy)
        if self.positions == "rope" and self.rotated_dims % 2:
            raise InputError(
                f"model.rope_fraction {self.rope_fraction:g} rotates {self.rotated_dims} of the {self.head_size} dims "
                "of a head, which turn in pairs: use a share that is an even number"
            )
        if len(set(self.layer_pattern)) == 1:
            kind = self.layer_pattern[0]
            remedy = f"leave it empty, and model.window {'set' if kind == 'local' else 'unset'}"
            raise InputError(f"model.layer_pattern has {kind} layers only: {remedy}")
        if self.embedding_scale and self.positions == "learned":
            raise InputError(
                "model.embedding_scale scales tokens alone, but rows of model.positions learned are looked up together "
                "with them: choose other positions, or leave it off"
            )
        dense = self.dense_layers > 0 or not self.experts
        if (dense and self.ffn_size < 1) or (self.experts and self.expert_size < 1):
            raise InputError(f"model.ffn_hidden_size comes out as 0 for hidden_size {self.hidden_size}: set it")

    def _check_experts(self) -> None:
        experts, k = self.experts, self.experts_per_token
        if self.family != "gpt":
            raise InputError(f"model.experts goes with model.family gpt, not {self.family}: leave it at 0")
        if self.bias:
            raise InputError("model.experts goes without biases: set model.bias=false (model.qkv_bias may stay)")
        if self.dense_layers >= self.num_layers:
            raise InputError(
                f"model.dense_layers {self.dense_layers} leaves no layer of model.num_layers {self.num_layers} to "
                "experts: lower it"
            )
        if self.dense_layers and self.layer_pattern:
            raise InputError("model.dense_layers goes without model.layer_pattern: leave one of them out")
        if k > experts:
            raise InputError(
                f"model.experts_per_token {k} exceeds model.experts {experts}: lower the one or raise the other"
            )

    @property
    def is_encoder_decoder(self) -> bool:
        """Tell whether a decoder attends to the output of an encoder."""
        return self.family == "t5"

    @property
    def position_rows(self) -> int:
        """Return P, the number of rows of a learned table of positions."""
        return self.max_positions + self.position_offset

    @property
    def kv_heads(self) -> int:
        """Return K, the number of key/value heads, after the default."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Return H, the width of a head, after the default."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotated_dims(self) -> int:
        """Return R, the dims of a head that rotary embedding rotates."""
        return int(self.head_size * self.rope_fraction)

    @property
    def kind_pattern(self) -> tuple[LayerKind, ...]:
        """Return `layer_pattern`; without one all layers are local if there is a window, and else all global."""
        return self.layer_pattern or ("global" if self.window is None else "local",)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of every layer."""
        pattern = self.kind_pattern
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    @property
    def gated(self) -> bool:
        """Tell whether the MLP multiplies two input matrices."""
        return self.activation in ("swiglu", "geglu")

    @property
    def expert_size(self) -> int:
        """Return F of an expert, the width of its MLP, after the default."""
        return self.expert_ffn_size or self.ffn_size

    @property
    def ffn_size(self) -> int:
        """Return F, the width of the MLP, after the default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    @property
    def has_qkv_bias(self) -> bool:
        """Tell whether the query/key/value projection has a bias, after the default."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def padded_vocab_size(self) -> NonNegativeInt:
        """Return V, the number of rows of the embedding table; those past `vocab_size` take part in nothing."""
        if self.vocab_size is None:
            raise InputError("model.vocab_size is not known yet: set it or give a tokenizer")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
