"""Megatron-LM's decoder and BERT written again, number by number in float64, on its own arguments and tensors.

Weights have the layout of its modules: [out, in], linear_qkv by query group, the gate of a gated fc1 first.

Shapes: S sequence, D hidden, G query groups, N heads, H head dim, F ffn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def random_tensors(args: dict[str, Any], seed: int = 0) -> Tensors:  # noqa: PLR0912 - one table
    """Weights of a model of these arguments, every one random; experts as `--moe-grouped-gemm` of TE names them."""
    rng = np.random.default_rng(seed)
    d, h, f = args["hidden_size"], args["kv_channels"], args["ffn_hidden_size"]
    groups = args["num_query_groups"] if args.get("group_query_attention") else args["num_attention_heads"]
    width = (args["num_attention_heads"] + 2 * groups) * h
    parts, bias = (2 if args.get("swiglu") else 1), args.get("add_bias_linear", True)
    norms = ("weight", "bias") if args["normalization"] == "LayerNorm" else ("weight",)

    vocabulary = args["padded_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, d)}
    if args["position_embedding_type"] == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (args["max_position_embeddings"], d)
    if args.get("untie_embeddings_and_output_weights"):
        shapes["output_layer.weight"] = (vocabulary, d)
    for kind in norms:
        shapes[f"decoder.final_layernorm.{kind}"] = (d,)
    if args.get("bert"):
        square = ("lm_head.dense", "pooler.dense")
        shapes |= {f"{name}.{kind}": (d, d)[: 2 - (kind == "bias")] for name in square for kind in ("weight", "bias")}
        shapes |= {f"lm_head.layer_norm.{kind}": (d,) for kind in norms}
        shapes |= {"output_layer.bias": (vocabulary,), "binary_head.weight": (2, d), "binary_head.bias": (2,)}
        shapes["embedding.tokentype_embeddings.weight"] = (2, d)
    for i in range(args["num_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "self_attention.linear_qkv.weight": (width, d),
            "self_attention.linear_proj.weight": (d, args["num_attention_heads"] * h),
        }
        for kind in norms:
            layer[f"self_attention.linear_qkv.layer_norm_{kind}"] = (d,)
            if args.get("qk_layernorm"):
                layer |= {f"self_attention.{part}_layernorm.{kind}": (h,) for part in "qk"}
        if bias or args.get("add_qkv_bias"):
            layer["self_attention.linear_qkv.bias"] = (width,)
        if bias:
            layer |= {"self_attention.linear_proj.bias": (d,), "mlp.linear_fc1.bias": (parts * f,)}
            layer["mlp.linear_fc2.bias"] = (d,)
        if experts := args.get("num_experts"):
            layer |= {"mlp.router.weight": (experts, d), **{f"pre_mlp_layernorm.{kind}": (d,) for kind in norms}}
            for e in range(experts):
                layer[f"mlp.experts.linear_fc1.weight{e}"] = (parts * args["moe_ffn_hidden_size"], d)
                layer[f"mlp.experts.linear_fc2.weight{e}"] = (d, args["moe_ffn_hidden_size"])
        else:
            layer |= {"mlp.linear_fc1.weight": (parts * f, d), "mlp.linear_fc2.weight": (d, f)}
            layer |= {f"mlp.linear_fc1.layer_norm_{kind}": (d,) for kind in norms}
        if shared := args.get("moe_shared_expert_intermediate_size"):
            layer["mlp.shared_experts.linear_fc1.weight"] = (parts * shared, d)
            layer["mlp.shared_experts.linear_fc2.weight"] = (d, shared)
            layer["mlp.shared_experts.gate_weight"] = (1, d)
        shapes |= {f"decoder.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {name: rng.normal(scale=0.4, size=shape).astype(np.float32) for name, shape in shapes.items()}


def logits(args: dict[str, Any], tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Tokens [S] -> logits [S, V], with all padding rows of the vocabulary."""
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    return hidden(args, tensors, tokens) @ t.get("output_layer.weight", t["embedding.word_embeddings.weight"]).T


def bert_logits(args: dict[str, Any], tensors: Tensors, tokens: np.ndarray, types: np.ndarray) -> list[np.ndarray]:
    """Tokens [S] of types [S] -> logits [S, V] of masked tokens, and [2] of the order of a pair."""
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    x = hidden(args, tensors, tokens, types)
    y = x @ t["lm_head.dense.weight"].T + t["lm_head.dense.bias"]
    y = norm(args, t, "lm_head.layer_norm.", exact_gelu(y))
    pooled = np.tanh(x[0] @ t["pooler.dense.weight"].T + t["pooler.dense.bias"])
    masked = y @ t["embedding.word_embeddings.weight"].T + t["output_layer.bias"]
    return [masked, pooled @ t["binary_head.weight"].T + t["binary_head.bias"]]


def hidden(args: dict[str, Any], tensors: Tensors, tokens: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
    """Tokens [S] -> [S, D] after the last norm."""
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    x = t["embedding.word_embeddings.weight"][tokens]
    if "embedding.position_embeddings.weight" in t:
        x = x + t["embedding.position_embeddings.weight"][: len(tokens)]
    if types is not None:
        x = x + t["embedding.tokentype_embeddings.weight"][types]
    for i in range(args["num_layers"]):
        prefix = f"decoder.layers.{i}."
        layer = {name.removeprefix(prefix): value for name, value in t.items() if name.startswith(prefix)}
        x = x + attention(args, layer, norm(args, layer, "self_attention.linear_qkv.layer_norm_", x))
        if args.get("num_experts"):
            x = x + mixture(args, layer, norm(args, layer, "pre_mlp_layernorm.", x))
        else:
            x = x + mlp(args, layer, norm(args, layer, "mlp.linear_fc1.layer_norm_", x))
    return norm(args, t, "decoder.final_layernorm.", x)


def norm(args: dict[str, Any], t: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    """LayerNorm or RMSNorm of the last dim; with apply_layernorm_1p the gain is what is stored plus one."""
    gain = t[prefix + "weight"] + (1 if args.get("apply_layernorm_1p") else 0)
    if args["normalization"] == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + args["norm_epsilon"]) * gain
    return y + t[prefix + "bias"] if prefix + "bias" in t else y


def attention(args: dict[str, Any], t: Tensors, x: np.ndarray) -> np.ndarray:
    """[S, D] -> [S, D], one head after the other."""
    n, h = args["num_attention_heads"], args["kv_channels"]
    groups = args["num_query_groups"] if args.get("group_query_attention") else n
    mixed = x @ t["self_attention.linear_qkv.weight"].T + t.get("self_attention.linear_qkv.bias", 0)
    mixed = mixed.reshape(len(x), groups, n // groups + 2, h)
    window = args["window_size"][0] if args.get("window_size") else len(x)
    scale = args.get("softmax_scale") or 1 / math.sqrt(h)
    heads = []
    for head in range(n):
        group, which = divmod(head, n // groups)
        q, k, v = (mixed[:, group, part] for part in (which, -2, -1))
        if args.get("qk_layernorm"):
            q, k = (norm(args, t, f"self_attention.{part}_layernorm.", y) for part, y in (("q", q), ("k", k)))
        if args["position_embedding_type"] == "rope":
            q, k = rotate(args, q), rotate(args, k)
        scores = q @ k.T * scale
        for row in range(len(x)):
            for column in range(len(x)):
                if not args.get("bert") and (column > row or column < row - window):
                    scores[row, column] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    out = np.concatenate(heads, axis=-1) @ t["self_attention.linear_proj.weight"].T
    return out + t.get("self_attention.linear_proj.bias", 0)


def rotate(args: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """[S, H] with the first dims turned by the angle of their place."""
    rotated = int(x.shape[-1] * args.get("rotary_percent", 1.0))
    y = x.copy()
    for pair in range(rotated // 2):
        frequency = 1 / args.get("rotary_base", 10_000) ** (2 * pair / rotated)
        if args.get("use_rope_scaling"):
            length = 2 * math.pi / frequency
            low, high = 8192 / 1, 8192 / 4
            smooth = (8192 / length - 1) / (4 - 1)
            slow = frequency / args["rope_scaling_factor"]
            if length > low:
                frequency = slow
            elif length >= high:
                frequency = (1 - smooth) * slow + smooth * frequency
        a, b = (2 * pair, 2 * pair + 1) if args.get("rotary_interleaved") else (pair, pair + rotated // 2)
        angle = np.arange(len(x)) / (args.get("rotary_seq_len_interpolation_factor") or 1) * frequency
        y[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
        y[:, b] = x[:, b] * np.cos(angle) + x[:, a] * np.sin(angle)
    return y


def mlp(args: dict[str, Any], t: Tensors, x: np.ndarray, prefix: str = "mlp.") -> np.ndarray:
    """[S, D] -> [S, D]; the fused GELU is the tanh form, the other one exact."""
    hidden = x @ t[f"{prefix}linear_fc1.weight"].T + t.get(f"{prefix}linear_fc1.bias", 0)
    if args.get("swiglu"):
        gate, up = np.split(hidden, 2, axis=-1)
        hidden = gate / (1 + np.exp(-gate)) * up
    elif args.get("squared_relu"):
        hidden = np.maximum(hidden, 0) ** 2
    elif args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True):
        hidden = 0.5 * hidden * (1 + np.tanh(0.79788456 * hidden * (1 + 0.044715 * hidden * hidden)))
    else:
        hidden = exact_gelu(hidden)
    return hidden @ t[f"{prefix}linear_fc2.weight"].T + t.get(f"{prefix}linear_fc2.bias", 0)


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution up to it."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def mixture(args: dict[str, Any], t: Tensors, x: np.ndarray) -> np.ndarray:
    """[S, D] -> [S, D], token by token; pre_softmax takes the shares of all experts, else those of the chosen."""
    y = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = t["mlp.router.weight"] @ row
        chosen = np.argsort(-logits)[: args["moe_router_topk"]]
        of = logits if args.get("moe_router_pre_softmax") else logits[chosen]
        for expert in chosen:
            own = {f"linear_fc{i}.weight": t[f"mlp.experts.linear_fc{i}.weight{expert}"] for i in (1, 2)}
            y[token] += np.exp(logits[expert]) / np.exp(of).sum() * mlp(args, own, row, "")
    if args.get("moe_shared_expert_intermediate_size"):
        gate = 1 / (1 + np.exp(-(x @ t["mlp.shared_experts.gate_weight"].T)))
        y += gate * mlp(args, t, x, "mlp.shared_experts.")
    return y
