"""Groups of look-alike codes: the vectorised masses against the definition, and the filters that bound a group."""

from __future__ import annotations

import torch

from speculative_ar.decoders.grouping import dynamic_groups, median_neighbour_distance, static_groups

GENERATOR = torch.Generator().manual_seed(0)
EMBEDDINGS = torch.randn(40, 3, generator=GENERATOR)
TARGET = torch.randn(2, 5, 40, generator=GENERATOR).softmax(-1)
SOURCE = torch.randn(2, 5, 40, generator=GENERATOR).softmax(-1)
DRAFTS = torch.randint(40, (2, 5), generator=GENERATOR)


def members(row: torch.Tensor, draft: int, size: int, gap: float, limit: float) -> list[int]:
    ascending = sorted(range(len(row)), key=lambda code: (float(row[code]), code))
    rank = ascending.index(draft)
    near = ascending[max(rank - size // 2, 0) : rank + size - size // 2]
    return [
        code
        for code in near
        if abs(row[code] - row[draft]) <= gap and (EMBEDDINGS[code] - EMBEDDINGS[draft]).norm() <= limit
    ]


def test_dynamic_groups_are_ranks_around_the_draft_within_both_limits() -> None:
    for size, gap, distance in ((14, 1.0, 0.0), (7, 0.02, 0.0), (14, 0.05, 3.0), (1, 1.0, 0.0)):
        groups = dynamic_groups(EMBEDDINGS, size, gap, distance)
        limit = distance * median_neighbour_distance(EMBEDDINGS) if distance else float("inf")
        p, q = groups.masses(TARGET, SOURCE, DRAFTS)
        for index in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
            row, column = index
            group = members(TARGET[row, column], int(DRAFTS[row, column]), size, gap, limit)
            torch.testing.assert_close(p[row, column], TARGET[row, column, group].sum())
            torch.testing.assert_close(q[row, column], SOURCE[row, column, group].sum())


def test_a_group_of_one_is_the_draft() -> None:
    p, _ = dynamic_groups(EMBEDDINGS, 1, 1.0, 0.0).masses(TARGET, SOURCE, DRAFTS)
    assert torch.equal(p, TARGET.gather(-1, DRAFTS[..., None])[..., 0])


def test_static_groups_are_a_reproducible_partition_of_near_codes() -> None:
    groups = static_groups(EMBEDDINGS, 4)
    assert torch.equal(groups.group_of, static_groups(EMBEDDINGS, 4).group_of)
    assert groups.count == 10 and groups.group_of.max() < 10
    p, _ = groups.masses(TARGET, SOURCE, DRAFTS)
    same = groups.group_of == groups.group_of[DRAFTS[1, 2]]
    torch.testing.assert_close(p[1, 2], TARGET[1, 2, same].sum())
    within = torch.cdist(EMBEDDINGS, EMBEDDINGS)[groups.group_of[:, None] == groups.group_of].mean()
    assert within < 0.7 * torch.cdist(EMBEDDINGS, EMBEDDINGS).mean()


def test_median_neighbour_distance() -> None:
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0], [8.0]])
    assert median_neighbour_distance(line) == 1.0
