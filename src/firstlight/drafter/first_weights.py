"""First weights of a drafter that fit the data already: linear least squares, solved once.

The next last state of the target is regressed on the states and the embedded token that the drafter gets. The
states' part becomes `fc`; the token's part goes through the values of heads that look at their own index
only. Steps of gradient descent that are worth an epoch are saved by it. Invariant: what is fitted has seen
documents for training only.

Shapes: I indices, X inputs of the regression or of the projections, H hidden, V values that lie between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from firstlight.drafter.objective import make_teacher
from firstlight.drafter.prompts import TRAIN
from firstlight.drafter.shards import Shard, read_shard
from firstlight.drafter.target import Ends
from firstlight.models.eagle3 import Eagle3Drafter
from firstlight.models.eagle3_latent import LatentEagle3Drafter

MAX_INDICES = 32_768
KEY_SAMPLE = 8192
SAMPLE = 1024  # indices that the scale of the logits is chosen with
RIDGE = 0.01  # of each input's own square
SELF_SCORE = 15.0  # of a head with its own index; the one before has a third less
PAIR_SHARES = (0.5, 0.3, 0.2)  # of the self score, over the rotary pairs that turn fastest
SCALES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
QUIET = 0.25  # of what is drawn, for what else a head looks at


@dataclass
class _Sums:
    """What the regression needs of the indices that it has seen, and the last of them."""

    square_XX: torch.Tensor
    cross_XH: torch.Tensor
    sample: tuple[torch.Tensor, torch.Tensor] | None = None  # inputs [I, X], last states [I, H]
    every: torch.Tensor | None = None  # inputs [I, X] of prompts, too: they are keys
    num: int = 0


def fit_first_weights(drafter: Eagle3Drafter, ends: Ends, shards: list[Path], norm_eps: float) -> None:
    """Replaces first weights by fitted ones; the drafter must be as wide as its target."""
    config = drafter.config
    with torch.no_grad():
        sums = _sums(drafter, shards)
        if sums.sample is None or sums.every is None:
            return
        # Double precision: neighbouring layers' states are nearly the same.
        square = sums.square_XX.double()
        square += torch.diag(RIDGE * square.diagonal() + 1e-9 * square.diagonal().mean())
        weights_XH = torch.linalg.solve(square, sums.cross_XH.double()).float()
        num_states = len(config.state_layers) * config.target_hidden_size
        drafter.fc.weight.copy_(weights_XH[:num_states].t())
        size_H = (sums.square_XX.diagonal()[num_states:] / sums.num).sqrt().clamp(min=1e-6)
        inputs, last_states = sums.sample
        token_HH = _fit_attention(drafter, weights_XH[num_states:], size_H, sums.every)
        output = drafter.fc(inputs[:, :num_states]) + inputs[:, num_states:] @ token_HH
        _scale_logits(drafter, ends, output, last_states, norm_eps)


def _fit_attention(
    drafter: Eagle3Drafter,
    token_HH: torch.Tensor,
    size_H: torch.Tensor,
    every: torch.Tensor,
) -> torch.Tensor:
    """Lets attention add the token's part, as far as its values hold it; what is added of a token [H, H]."""
    c = drafter.config
    num_turned, most = c.head_size, c.num_kv_heads * c.head_size
    if isinstance(drafter, LatentEagle3Drafter):
        sizes = drafter.sizes
        num_turned, most = sizes.rope_size, min(sizes.latent_size, c.num_heads * sizes.value_size)
    to_values, from_values = _split(token_HH, size_H, most)
    always_one, x = _always_one(drafter, every, to_values @ from_values)
    shares = torch.tensor(PAIR_SHARES[: num_turned // 2])
    scores = shares / shares.sum() * SELF_SCORE
    if isinstance(drafter, LatentEagle3Drafter):
        num_heads = through_latents(drafter, to_values, from_values, every[:, -c.hidden_size :])
        look_at_itself(drafter, num_heads, always_one, scores, x)
    else:
        _through_values(drafter, to_values, from_values)
        _look_at_itself(drafter, always_one, scores)
    return to_values @ from_values


def _sums(drafter: Eagle3Drafter, shards: list[Path]) -> _Sums:
    width = drafter.fc.in_features + drafter.config.hidden_size
    sums = _Sums(torch.zeros(width, width), torch.zeros(width, drafter.config.target_hidden_size))
    for path in shards:
        shard = read_shard(path)
        chosen = _supervised_for_training(shard)[: MAX_INDICES - sums.num]
        if len(chosen):
            inputs = _inputs(drafter, shard, chosen)
            final = shard.final[chosen].float()
            sums.square_XX += inputs.t() @ inputs
            sums.cross_XH += inputs.t() @ final
            sums.sample = (inputs[-SAMPLE:], final[-SAMPLE:])
            sums.every = _inputs(drafter, shard, torch.arange(min(len(shard.tokens), KEY_SAMPLE)))
            sums.num += len(chosen)
        if sums.num >= MAX_INDICES:
            break
    return sums


def _inputs(drafter: Eagle3Drafter, shard: Shard, chosen: torch.Tensor) -> torch.Tensor:
    embedded = drafter.embedding_VH[shard.tokens[chosen].long()]
    return torch.cat((shard.states[chosen].float().flatten(1), drafter.input_layernorm(embedded)), 1)


def _supervised_for_training(shard: Shard) -> torch.Tensor:
    wanted = torch.zeros_like(shard.supervised)
    for document, span in shard.spans():
        wanted[span] = document.split == TRAIN
    return (shard.supervised & wanted).nonzero().squeeze(1)


def _split(
    token_HH: torch.Tensor,
    size_H: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token's part as two matrices with at most so many values in between."""
    left, strength, right = torch.linalg.svd(size_H[:, None] * token_HH, full_matrices=False)
    rank = min(most, len(strength))
    root = strength[:rank].sqrt()
    return left[:, :rank] * root / size_H[:, None], root[:, None] * right[:rank]


def _through_values(
    drafter: Eagle3Drafter,
    to_values_HV: torch.Tensor,
    from_values_VH: torch.Tensor,
) -> None:
    """Gives the values and one head of each group the token's part."""
    config = drafter.config
    drafter.v_proj.weight.zero_()
    drafter.v_proj.weight[: len(from_values_VH), : config.hidden_size] = to_values_HV.t()
    group, size = config.num_heads // config.num_kv_heads, config.head_size
    for kv_head in range(config.num_kv_heads):
        part = from_values_VH[kv_head * size : (kv_head + 1) * size]
        column = kv_head * group * size
        drafter.o_proj.weight[:, column : column + len(part)] = part.t()


def _always_one(
    drafter: Eagle3Drafter,
    inputs: torch.Tensor,
    token_HH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What makes the same of every input of the projections [X], and these inputs [I, X]."""
    embedded = inputs[:, -drafter.config.hidden_size :]
    fused = drafter.fc(inputs[:, : -drafter.config.hidden_size])
    both = (fused, fused + embedded @ token_HH)  # of a true state, and of a draft
    x = torch.cat([torch.cat((embedded, drafter.hidden_norm(hidden)), 1) for hidden in both])
    wide = x.double()
    square = wide.t() @ wide
    square += torch.diag(RIDGE * square.diagonal() + 1e-9 * square.diagonal().mean())
    return torch.linalg.solve(square, wide.sum(0)).float(), x


def _look_at_itself(drafter: Eagle3Drafter, always_one_X: torch.Tensor, scores: torch.Tensor) -> None:
    """Queries and keys that are the same everywhere: rotated, they agree best at a distance of nothing."""
    config = drafter.config
    group, size = config.num_heads // config.num_kv_heads, config.head_size
    constant = (scores * size**0.5).sqrt()[:, None] * always_one_X
    for kv_head in range(config.num_kv_heads):
        for projection, head in ((drafter.k_proj, kv_head), (drafter.q_proj, kv_head * group)):
            rows = projection.weight[head * size : (head + 1) * size]
            rows *= QUIET
            rows[: len(scores)] = constant


def _scale_logits(
    drafter: Eagle3Drafter,
    ends: Ends,
    output: torch.Tensor,
    last_states: torch.Tensor,
    norm_eps: float,
) -> None:
    """A forecast is less sure than the target: the scale of the norm that costs least."""
    probs = make_teacher(ends, drafter.target_ids_R, norm_eps).probs(last_states)
    losses = []
    for scale in SCALES:
        drafter.norm.weight.copy_(ends.norm * scale)
        losses.append(float(-(probs * drafter.logits(output).log_softmax(-1)).sum(-1).mean()))
    drafter.norm.weight.copy_(ends.norm * SCALES[losses.index(min(losses))])


# Fitted first weights of a drafter's latent attention: the token's part goes through the latents. As many
# heads as the latents fill hand them on and look at their own index; the others stay as they were drawn.
# Nothing but weights of attention changes. Shapes: I indices, X inputs of the projections, H hidden, L
# latent, V values of a head.


def through_latents(
    drafter: LatentEagle3Drafter,
    to_values_HV: torch.Tensor,
    from_values_VH: torch.Tensor,
    embedded_IH: torch.Tensor,
) -> int:
    """Lets the latents be the token's part, and heads bring it back; how many heads that takes."""
    sizes, num = drafter.sizes, from_values_VH.shape[0]
    to_latents = drafter.kv_a_proj_with_mqa.weight
    to_latents[: sizes.latent_size] = 0.0
    to_latents[:num, : drafter.config.hidden_size] = to_values_HV.t()
    # The norm divides by each token's own size: on the whole it is undone.
    latents = embedded_IH @ to_values_HV
    drafter.kv_a_layernorm.weight.fill_(float(latents.square().sum(-1).div(sizes.latent_size).sqrt().mean()))
    expanding = drafter.kv_b_proj.weight.unflatten(0, (drafter.config.num_heads, -1))
    num_heads = -(-num // sizes.value_size)
    expanding[:num_heads, sizes.nope_size :] = 0.0
    for value in range(num):
        head, place = divmod(value, sizes.value_size)
        expanding[head, sizes.nope_size + place, value] = 1.0
        drafter.o_proj.weight[:, value] = from_values_VH[value]
    return num_heads


def look_at_itself(
    drafter: LatentEagle3Drafter,
    num_heads: int,
    always_one_X: torch.Tensor,
    pair_scores: torch.Tensor,
    x_IX: torch.Tensor,
) -> None:
    """Rotary keys, and queries of the first heads, that are the same everywhere.

    `pair_scores`: what each of the pairs that turn fastest adds to the score of an index with itself.
    """
    c, sizes = drafter.config, drafter.sizes
    scale = c.head_size**-0.5 if c.score_scale is None else c.score_scale
    heights = (pair_scores / scale).sqrt()
    turning = torch.arange(len(heights)) * 2
    keys = drafter.kv_a_proj_with_mqa.weight[sizes.latent_size :]
    keys *= QUIET
    keys[turning] = heights[:, None] * always_one_X
    last = drafter.q_proj.weight if sizes.query_rank is None else drafter.q_b_proj.weight
    of_heads = last.unflatten(0, (c.num_heads, -1))[:num_heads]
    of_heads *= QUIET
    if sizes.query_rank is None:
        of_heads[:, sizes.nope_size + turning] = heights[:, None] * always_one_X
        return
    narrow = drafter.q_a_proj.weight
    narrow[0] = always_one_X
    usual = drafter.q_a_layernorm(x_IX @ narrow.t())[:, 0].mean()
    of_heads[:, sizes.nope_size + turning] = 0.0
    of_heads[:, sizes.nope_size + turning, 0] = heights / usual
