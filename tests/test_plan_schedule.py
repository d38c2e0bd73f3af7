"""How well plans balance, and what each schedule promises: load bound, cuts, order inside a queue, classes.

Loads are counted from the packed items; expected totals come from the lengths.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from backend import on_gpu, on_hopper
from plan_executor import ClassView
from plan_layouts import GROUP_SIZES, Setting, paged_layout, random_layout, random_setting

import jaxinfer
from jaxinfer import BlockSparse, Variant, _native


def decode_layout(kv_len: Any) -> BlockSparse:
    rng = np.random.default_rng(0)
    return paged_layout(rng, np.arange(len(kv_len) + 1), kv_len, 16, len(kv_len))


def loads(cls: ClassView, costs: tuple[int, int, int, int, int]) -> np.ndarray[Any, Any]:
    """Cost of each queue's items, int64 [num_queues]."""
    fixed, alpha, beta = costs[:3]
    used = cls.used
    kv_tokens = used["kv_end"].astype(np.int64) - used["kv_begin"]
    spent = fixed + alpha * used["flags"].astype(np.int64) + beta * kv_tokens
    cost = np.where(used["bsr_row"] >= 0, spent, 0)
    before = np.concatenate([[0], np.cumsum(cost)])
    return np.asarray(np.diff(before[cls.queue_indptr]))


def tiles_of(cls: ClassView) -> dict[tuple[int, int], tuple[int, int]]:
    """Per (row, first token): tokens and KV tokens of the tile, from its pieces."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for i in cls.used:
        if i["bsr_row"] >= 0:
            key = (int(i["bsr_row"]), int(i["token_begin"]))
            before = out.get(key, (0, 0))[1]
            out[key] = (int(i["flags"]), before + int(i["kv_end"] - i["kv_begin"]))
    return out


def test_load_bound_and_number_of_cuts() -> None:
    cut = {False: 0, True: 0}  # by schedule: lpt, runs
    for seed in range(400):
        rng = np.random.default_rng(1000 + seed)
        group_size = int(rng.choice(GROUP_SIZES))
        # Random layouts are short beside the granule that runs cut at.
        layout = random_layout(rng, group_size)
        if seed % 4 == 0:
            layout = decode_layout(rng.integers(1, 4000, int(rng.integers(1, 12))))
        setting = dataclasses.replace(
            random_setting(rng, group_size, layout.num_layouts), batch_invariant=False
        )
        fixed, alpha, beta, floor, _ = setting.costs
        view = setting.view(layout)
        for cls, (tile, *_) in zip(view.classes, setting.classes, strict=True):
            tiles = tiles_of(cls)
            if not tiles:
                continue
            queue = loads(cls, setting.costs)
            cuts = sum(int(i["bsr_row"] >= 0) for i in cls.used) - len(tiles)
            # One class uses all queues; of two, a class uses a prefix of its queues.
            used = len(queue) if len(view.classes) == 1 else int(np.flatnonzero(queue)[-1]) + 1
            own = max(fixed + alpha * tokens for tokens, _ in tiles.values())
            total = sum(fixed + alpha * tokens + beta * kv for tokens, kv in tiles.values())
            quota = -(-total // used) + own
            if setting.runs:  # a queue ends with less room than the smallest piece and a granule
                rows = layout.kv_len[cls.used["bsr_row"][cls.used["bsr_row"] >= 0]]
                smallest = max(floor, 64 * -(-int(rows.max()) // (64 * 16)))
                bound = quota + own + beta * (smallest + 96)
                assert queue.max() <= max(bound, quota + 80)
            else:
                bound = quota + 1.5 * beta * floor + own
                if not cuts and tile >= 128:  # whole tiles, because cuts and their merge would cost more
                    bound += 128 + 4 * used * max(tokens for tokens, _ in tiles.values())
                # CTAs that run queues of several heads are levelled themselves: see level.h.
                pair = (queue + queue[::-1]).max() / 2 if tile >= 128 else queue.max()
                assert min(queue.max(), pair) <= bound
            assert cuts <= used
            cut[setting.runs] += cuts
    assert min(cut.values()) > 100, cut


def skewed_lengths(batch: int, mean: int) -> np.ndarray[Any, Any]:
    """Zipf lengths (1.5) scaled to a mean, between 16 and 32768."""
    rng = np.random.default_rng(1)
    z = rng.zipf(1.5, batch * 8).astype(float)
    z = z[z < 1000][:batch]
    return np.minimum(np.maximum(16, (z / z.mean() * mean).astype(int)), 32768)


BALANCE = Setting(4, 8, ((16, True, 33, 264),), costs=(0, 0, 1, 128, 1))


def imbalance(kv_len: Any, setting: Setting = BALANCE) -> float:
    queue = loads(setting.view(decode_layout(kv_len)).classes[0], (0, 0, 1, 0, 0))
    assert queue.sum() == np.sum(kv_len)
    return float(queue.max() / queue.mean())


@pytest.mark.parametrize(("batch", "mean", "most"), [(16, 1024, 1.05), (64, 2048, 1.03), (128, 1024, 1.02)])
def test_skewed_batches_are_balanced(batch: int, mean: int, most: float) -> None:
    assert imbalance(skewed_lengths(batch, mean)) <= most


@pytest.mark.parametrize("kv_len", [2048, 8192])
def test_equal_lengths_are_balanced_for_every_batch_size(kv_len: int) -> None:
    worst = max(imbalance(np.full(batch, kv_len)) for batch in range(33, 257))
    assert worst <= 1.05


def test_runs_are_contiguous_and_balanced() -> None:
    setting = dataclasses.replace(BALANCE, runs=True, costs=(96, 0, 1, 128, 1))
    for kv_len in (skewed_lengths(64, 2048), np.full(40, 4096)):
        cls = setting.view(decode_layout(kv_len)).classes[0]
        assert loads(cls, setting.costs).max() <= 1.1 * loads(cls, setting.costs).mean()
        at = [(int(i["bsr_row"]), int(i["kv_begin"])) for i in cls.used]
        assert at == sorted(at)


def test_causal_prefill_is_balanced_by_clipped_ranges() -> None:
    layout = paged_layout(np.random.default_rng(0), [0, 4096], [4096], 16, 4096)
    setting = Setting(4, 8, ((128, True, 33, 132),), Variant(causal=True), costs=(0, 0, 1, 256, 1))
    queue = loads(setting.view(layout).classes[0], setting.costs)
    assert queue.max() <= 1.03 * queue.mean()


def prefill_items(q_len: Any, kv_len: Any, causal: bool = True) -> ClassView:
    """The class of 128 rows, 32 query and 8 KV heads on 132 CTAs, with the planner's own costs."""
    qo = np.concatenate([[0], np.cumsum(q_len)])
    layout = paged_layout(np.random.default_rng(0), qo, kv_len, 16, int(qo[-1]))
    setting = Setting(4, 8, ((128, True, 33, 132),), Variant(causal=causal), costs=None)
    return setting.view(layout).classes[0]


@pytest.mark.parametrize(("lengths", "most"), [([1024] * 8, 1.02), (range(500, 1012, 32), 1.03)])
def test_short_prompts_are_balanced_in_whole_blocks(lengths: Any, most: float) -> None:
    """What a queue takes is its items' blocks of 128 KV tokens, and 1.7 blocks for each of them."""
    cls = prefill_items(lengths, lengths)
    blocks = -(-(cls.used["kv_end"] - cls.used["kv_begin"]) // 128) + 1.7
    queue = np.asarray([blocks[a:b].sum() for a, b in itertools.pairwise(cls.queue_indptr)])
    assert queue.max() <= most * queue.mean()
    # A CTA's second queue is as far from the end as its first from the beginning.
    pair = queue + queue[::-1]
    assert pair.max() <= 1.011 * pair.mean()


def test_tiles_of_a_compute_bound_class_are_cut_only_where_balance_needs_it() -> None:
    for causal in (True, False):
        chunks = prefill_items([512] * 16, [8192] * 16, causal)
        assert len(tiles_of(chunks)) == len(chunks.used) == 256
        assert (chunks.used["out"] == -1).all()
        one = prefill_items([128], [32768], causal)
        assert len(tiles_of(one)) == 4 and len(one.used) >= 32


@pytest.mark.parametrize(("lengths", "most"), [([16384], 1.002), ([4096] * 4, 1.008), ([2048] * 16, 1.008)])
def test_ctas_that_whole_tiles_leave_with_one_more_share_its_end(lengths: list[int], most: float) -> None:
    """Equal tiles on 33 queues, of which a CTA runs one from either end, or the one in the middle twice."""
    cls = prefill_items(lengths, lengths, causal=False)
    cost = 224 + (cls.used["kv_end"].astype(np.int64) - cls.used["kv_begin"])
    queue = np.asarray([cost[a:b].sum() for a, b in itertools.pairwise(cls.queue_indptr)])
    pair = queue + queue[::-1]
    assert pair.max() <= most * pair.mean()
    # By no more tiles than have to be cut.
    tiles = len(tiles_of(cls))
    assert len(cls.used) - tiles <= 9 and np.count_nonzero(cls.used["kv_begin"] == 0) == tiles
    assert len({int(i["token_begin"]) for i in cls.used if i["out"] >= 0}) == 1


@pytest.mark.parametrize(
    ("num_ctas", "heads", "queues"),
    [
        (264, 8, 33),
        (132, 8, 33),
        (32, 8, 4),
        (32, 1, 32),
        (32, 32, 1),
        (32, 3, 32),
        (264, 7, 37),
        (1, 5, 1),
        (7, 2, 7),
    ],
)
def test_number_of_queues(num_ctas: int, heads: int, queues: int) -> None:
    assert _native.choose_num_queues(num_ctas, heads) == queues


def test_number_of_queues_is_the_smallest_that_fills_its_last_round() -> None:
    for num_ctas in (1, 2, 3, 7, 32, 100, 132, 264, 296):
        for heads in range(1, 130):
            fits = [q for q in range(1, num_ctas + 1) if (-q * heads % num_ctas) / num_ctas <= 0.02]
            assert _native.choose_num_queues(num_ctas, heads) == fits[0]


GPU = Setting(
    4,
    8,
    ((16, True, 33, 264), (128, True, 33, 132)),
    Variant(causal=True),
    (0, 0, 1, 128, 1),
    side_by_side=True,
)


def mixed_layout(decode: Any, chunks: list[tuple[int, int]]) -> BlockSparse:
    """Single tokens over `decode` KV tokens each, then chunks as (q_len, kv_len)."""
    q_len = [1] * len(decode) + [q for q, _ in chunks]
    kv_len = [*decode, *(kv for _, kv in chunks)]
    return paged_layout(np.random.default_rng(0), np.cumsum([0, *q_len]), kv_len, 16, sum(q_len))


def queues_used(setting: Setting, layout: BlockSparse) -> list[int]:
    """Of each class; checked to be the first ones."""
    out = []
    for cls in setting.view(layout).classes:
        queue = loads(cls, setting.costs)
        out.append(int(np.count_nonzero(queue)))
        assert not queue[out[-1] :].any()
    return out


def modelled_end(work: list[Any], reading: int, computing: int) -> float:
    """When both classes of GPU have ended on so many queues; `work` in CTAs times time."""
    alone, share = work[0] / 264, 264 / (8 * reading)
    return float(max(alone * max(7 / 8 + share / 6, 13 * share / 25), work[1] / (8 * computing)))


def test_classes_side_by_side_fit_the_machine_and_end_early() -> None:
    """Against every split of the machine: the end that the planner's own cost model gives each."""
    split = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        # Enough for every queue: those that stay empty for want of tiles would look like another decision.
        decode = rng.integers(500, 9000, int(rng.integers(33, 128)))
        lengths = [
            (int(q), int(q + rng.integers(0, 6000))) for q in rng.integers(256, 1500, rng.integers(1, 5))
        ]
        layout = mixed_layout(decode, lengths)
        work = [loads(cls, GPU.costs).sum() * 8 for cls in GPU.view(layout).classes]

        in_turn = work[0] / 264 + work[1] / 132
        best = min(in_turn, min(modelled_end(work, 33 - 2 * n, n) for n in range(1, 17)))
        used = queues_used(GPU, layout)
        if used[0] + 2 * used[1] > 33:  # in turn, each class on all the queues that it can fill
            assert in_turn <= 1.01 * best
            continue
        split += 1
        assert 8 * used[1] + 8 * used[0] / 2 <= 132
        assert modelled_end(work, *used) <= 1.08 * best  # reads may end 1/16 later
        assert np.array_equal(GPU.pack(layout), GPU.pack(layout))
    assert split > 20


def test_few_large_tiles_stay_whole_beside_decode() -> None:
    """16 tiles on a few queues: cuts would end the class earlier than the other one, and leave a merge."""
    layout = mixed_layout(np.full(63, 8192), [(512, 8192)])
    setting = dataclasses.replace(GPU, costs=None)  # the defaults
    cls = setting.view(layout).classes[1]
    assert len(cls.used) == len(tiles_of(cls)) == 16
    assert (cls.used["out"] == -1).all()


def test_a_short_chunk_takes_few_queues() -> None:
    """Its tiles are too short to be cut, so that more queues would not make it end earlier."""
    defaults = dataclasses.replace(GPU, costs=None, runs=True)
    layout = mixed_layout(np.full(64, 2048), [(128, 1024)])
    queues = [int(np.count_nonzero(loads(cls, (96, 1, 1, 64, 1)))) for cls in defaults.view(layout).classes]
    assert queues == [31, 1]


def test_a_class_alone_uses_all_its_queues() -> None:
    layouts = mixed_layout(np.full(64, 4096), []), mixed_layout([], [(4096, 4096)])
    for index, layout in enumerate(layouts):
        for setting in (GPU, dataclasses.replace(GPU, side_by_side=False)):
            used = queues_used(setting, layout)
            assert used[index] == 33 and used[1 - index] == 0


@pytest.mark.parametrize(
    "setting",
    [
        dataclasses.replace(GPU, side_by_side=False),
        # Both read.
        dataclasses.replace(GPU, classes=((16, True, 33, 264), (64, True, 33, 264))),
        # A CTA has workers of many queues, so that few queues would not be few CTAs.
        dataclasses.replace(GPU, num_kv_heads=7, classes=((16, True, 37, 264), (128, True, 94, 132))),
    ],
)
def test_classes_in_turn_use_all_their_queues(setting: Setting) -> None:
    layout = mixed_layout(np.full(64, 8192), [(4096, 8192)])
    assert queues_used(setting, layout) == [queues for _, _, queues, _ in setting.classes]


def test_rows_go_to_the_first_class_that_holds_them() -> None:
    q_len = [1, 4, 5, 32, 33, 100]
    qo = np.concatenate([[0], np.cumsum(q_len)])
    layout = paged_layout(np.random.default_rng(0), qo, [64] * 6, 16, int(qo[-1]))
    view = Setting(4, 1, ((16, True, 2, 2), (128, True, 2, 2))).view(layout)
    rows = [sorted({int(i["bsr_row"]) for i in cls.used}) for cls in view.classes]
    assert rows == [[0, 1], [2, 3, 4, 5]]
    assert sorted(int(i["flags"]) for i in view.classes[1].used if i["bsr_row"] == 5) == [4, 32, 32, 32]


def test_an_unpacked_class_holds_as_many_tokens_as_rows() -> None:
    layout = paged_layout(np.random.default_rng(0), [0, 300], [300], 16, 300)
    view = Setting(4, 1, ((128, False, 2, 2),)).view(layout)
    assert {int(i["flags"]) for i in view.items()} == {128, 44}


def section_setting(num_kv_heads: int = 1) -> Setting:
    return Setting(1, num_kv_heads, ((128, True, 1, 1),), Variant(causal=True), costs=(0, 0, 1, 1024, 1))


def test_compute_bound_queues_go_section_by_section() -> None:
    """K and V of a section stay below 16 MB: rows of 40000 tokens x 2 x 16 x 4 bytes are 5.1 MB each."""
    layout = paged_layout(np.random.default_rng(0), np.arange(8) * 256, [40_000] * 7, 16, 7 * 256)
    items = section_setting().view(layout).classes[0].queue(0)
    section = items["bsr_row"] // 3
    assert (np.diff(section) >= 0).all()
    for s in range(3):
        length = (items["kv_end"] - items["kv_begin"])[section == s]
        assert (np.diff(length) <= 0).all()


def test_memory_bound_queues_start_with_the_longest() -> None:
    view = Setting(1, 1, ((16, True, 3, 3),), costs=(0, 0, 1, 1024, 1)).view(
        decode_layout([100, 900, 900, 50, 20, 10])
    )
    for q in range(3):
        length = [int(i["kv_end"] - i["kv_begin"]) for i in view.classes[0].queue(q)]
        assert length == sorted(length, reverse=True)


def plan_tiles(q_len: list[int], **kwargs: Any) -> tuple[int, ...]:
    qo = np.concatenate([[0], np.cumsum(q_len)])
    layout = jaxinfer.ragged(qo, np.arange(len(q_len) + 1))
    return tuple(c.tile for c in jaxinfer.plan(layout, **kwargs).spec.classes)


def test_tiles_come_from_capacities() -> None:
    llama = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    assert plan_tiles([1] * 8, **llama) == (16,)
    assert plan_tiles([512], **llama) == (128,)
    assert plan_tiles([1, 1, 512], **llama) == (16, 128)
    # A tile keeps its output in registers; two warpgroups have more than the portable kernel's warps.
    assert plan_tiles([1, 1, 512], **{**llama, "head_dim": 256}) == (16, 128 if on_hopper() else 64)
    assert plan_tiles([4, 4], **llama) == (16, 32)
    assert plan_tiles([1], num_qo_heads=71, num_kv_heads=1, head_dim=64) == (128,)
    # A prefix that 16 requests share fits one tile of 64 rows, so that it is read once.
    prefix, suffix = jaxinfer.ragged([0, 16], [0, 9]), jaxinfer.ragged(np.arange(17), np.arange(17))
    shared = jaxinfer.plan(jaxinfer.compose(prefix, suffix), **llama).spec
    assert tuple(c.tile for c in shared.classes) == (16, 64)
    # With batch_invariant the batch must not decide.
    invariant = [plan_tiles(q, **llama, batch_invariant=True) for q in ([1], [1, 1, 512], [4096])]
    assert set(invariant) == {(16, 128)}
    # Tile 1 is all that float32 has on a GPU, and is never chosen on a CPU.
    assert (plan_tiles([1] * 4, **llama, dtype="float32") == (1,)) == on_gpu()
    assert plan_tiles([1] * 4, **llama, tiles=(1,)) == (1,)
