"""The tensors that a model of a description has, as rows of headers: what a checkpoint must hold.

Invariant: names and shapes are those that the room `models` declares; a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.facts.checkpoint.weight_schemes import DeclaredWeights
from firstlight.facts.description import Experts, ModelDescription
from firstlight.facts.planning.tensor_groups import HeaderRow, number_range

_BLOCK_SPARSE = ("mixtral", "minimax_m2")  # their layers of experts have Mixtral's names


def declared_rows(
    description: ModelDescription, weights: DeclaredWeights, prefix: str = ""
) -> list[HeaderRow]:
    """Rows of every tensor. `prefix` stands before each name, as in a wrapped model."""
    rows = _Rows(description, weights, prefix)
    hidden, vocab = description.hidden_size, description.vocab_size
    rows.add("model.embed_tokens.weight", (vocab, hidden))
    layers = list(range(description.num_layers))
    where = f"model.layers.{number_range(layers)}"
    rows.add(f"{where}.input_layernorm.weight", (hidden,))
    _attention(rows, f"{where}.self_attn")
    rows.add(f"{where}.post_attention_layernorm.weight", (hidden,))
    experts = description.experts
    dense = layers if experts is None else [layer for layer in layers if layer in experts.dense_layers]
    sparse = [layer for layer in layers if layer not in dense]
    if dense:
        _mlp(rows, f"model.layers.{number_range(dense)}.mlp", description.intermediate_size)
    if sparse and experts is not None:
        _experts(rows, sparse, experts)
    rows.add("model.norm.weight", (hidden,))
    if not description.tie_embeddings:
        rows.add_matrix("lm_head", (vocab, hidden))
    return rows.made


def further_bytes(description: ModelDescription, weights: DeclaredWeights, num: int) -> int:
    """Bytes of so many layers that predict further tokens, as DeepSeek-V3's files have them.

    Each is a layer as the last one, the joining of state and token with its norms, and an embedding and a
    head of its own, stored once more.
    """
    rows = _Rows(description, weights, "")
    hidden, vocab, last = description.hidden_size, description.vocab_size, description.num_layers - 1
    where = f"model.layers.{last}"
    _attention(rows, f"{where}.self_attn")
    experts = description.experts
    if experts is not None and last not in experts.dense_layers:
        _experts(rows, [last], experts)
    else:
        _mlp(rows, f"{where}.mlp", description.intermediate_size)
    for name in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"):
        rows.add(f"{where}.{name}.weight", (hidden,))
    rows.add(f"{where}.eh_proj.weight", (hidden, 2 * hidden))
    for name in ("embed_tokens", "shared_head.head"):
        rows.add(f"{where}.{name}.weight", (vocab, hidden))
    return num * sum(row.num * row.nbytes for row in rows.made)


class _Rows:
    def __init__(self, description: ModelDescription, weights: DeclaredWeights, prefix: str) -> None:
        self.description, self.made = description, list[HeaderRow]()
        self._weights, self._prefix = weights, prefix

    def add(self, name: str, shape: tuple[int, ...], dtype: str = "") -> None:
        self.made.append(HeaderRow(self._prefix + name, dtype or self._weights.dtype, shape))

    def add_matrix(self, module: str, shape: tuple[int, int], *, bias: bool = False) -> None:
        """The weight of a linear layer, as the configuration says that it is stored."""
        for suffix, dtype, stored in self._weights.tensors(module, self._prefix + module, shape):
            self.add(f"{module}.{suffix}", stored, dtype)
        if bias:
            self.add(f"{module}.bias", shape[:1])


def _attention(rows: _Rows, where: str) -> None:
    if rows.description.latent is not None:
        _latent_attention(rows, where)
        return
    d = rows.description
    queries, keys = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
        rows.add_matrix(f"{where}.{name}_proj", (outputs, d.hidden_size), bias=d.attention_bias)
    rows.add_matrix(f"{where}.o_proj", (d.hidden_size, queries), bias=d.output_bias)
    if d.qk_norm or d.whole_qk_norm:
        for name, size in (("q", queries), ("k", keys)):
            rows.add(f"{where}.{name}_norm.weight", (size if d.whole_qk_norm else d.head_size,))


def _latent_attention(rows: _Rows, where: str) -> None:
    d, latent = rows.description, rows.description.latent
    assert latent is not None, "asked of latent attention alone"
    inputs = d.hidden_size
    if latent.query_rank is not None:
        inputs = latent.query_rank
        rows.add_matrix(f"{where}.q_a_proj", (inputs, d.hidden_size))
        rows.add(f"{where}.q_a_layernorm.weight", (inputs,))
    name = "q_proj" if latent.query_rank is None else "q_b_proj"
    rows.add_matrix(f"{where}.{name}", (d.num_heads * d.head_size, inputs))
    keys = (latent.latent_size + latent.rope_size, d.hidden_size)
    rows.add_matrix(f"{where}.kv_a_proj_with_mqa", keys)
    rows.add(f"{where}.kv_a_layernorm.weight", (latent.latent_size,))
    both = d.num_heads * (latent.nope_size + latent.value_size)
    rows.add_matrix(f"{where}.kv_b_proj", (both, latent.latent_size))
    rows.add_matrix(f"{where}.o_proj", (d.hidden_size, d.num_heads * latent.value_size))


def _mlp(rows: _Rows, where: str, inner: int) -> None:
    hidden, bias = rows.description.hidden_size, rows.description.mlp_bias
    rows.add_matrix(f"{where}.{{gate,up}}_proj", (inner, hidden), bias=bias)
    rows.add_matrix(f"{where}.down_proj", (hidden, inner), bias=bias)


def _experts(rows: _Rows, layers: Sequence[int], experts: Experts) -> None:
    hidden = rows.description.hidden_size
    is_block_sparse = rows.description.architecture in _BLOCK_SPARSE
    where = f"model.layers.{number_range(layers)}.{'block_sparse_moe' if is_block_sparse else 'mlp'}"
    rows.add(f"{where}.gate.weight", (experts.num, hidden))
    if experts.has_bias:
        bias = "e_score_correction_bias" if is_block_sparse else "gate.e_score_correction_bias"
        rows.add(f"{where}.{bias}", (experts.num,), "F32")
    each = f"{where}.experts.{{0-{experts.num - 1}}}"
    both, down = ("{w1,w3}", "w2") if is_block_sparse else ("{gate,up}_proj", "down_proj")
    rows.add_matrix(f"{each}.{both}", (experts.inner_size, hidden))
    rows.add_matrix(f"{each}.{down}", (hidden, experts.inner_size))
    if experts.shared_size:
        _mlp(rows, f"{where}.shared_experts", experts.shared_size)
