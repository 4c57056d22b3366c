"""Fitted first weights of a drafter's latent attention: the token's part goes through the latents.

Called by `first_weights`. As many heads as the latents fill hand them on and look at their own index; the
others stay as they were drawn. Invariant: nothing but weights of attention changes.

Shapes: I indices, X inputs of the projections, H hidden, L latent, V values of a head.
"""

from __future__ import annotations

import torch

from firstlight.models.eagle3_latent import LatentEagle3Drafter

QUIET = 0.25  # of what is drawn, for what else a head looks at


def through_latents(
    drafter: LatentEagle3Drafter,
    to_values_HV: torch.Tensor,  # noqa: N803 - shape suffix
    from_values_VH: torch.Tensor,  # noqa: N803
    embedded_IH: torch.Tensor,  # noqa: N803
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
    always_one_X: torch.Tensor,  # noqa: N803 - shape suffix
    pair_scores: torch.Tensor,
    x_IX: torch.Tensor,  # noqa: N803
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
