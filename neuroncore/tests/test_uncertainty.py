"""What is not known: each end changes what it says, alone and with the others."""

import pytest
from outcomes import refused
from scale_kernels import X

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore.hardware import MACHINES, TRN1, Throttle
from neuroncore.profile import uncertain
from neuroncore.timing.resources import RecentUse
from neuroncore.uncertainty import UNCERTAINTIES, assuming

MATMUL_NS = 512 / 2.4
"""Of 512 columns on trn2, without issue."""


@nc.jit
def matmuls(x, y, count, tiled=False):
    """`count` matmuls of resident operands, in turn on the four column groups if asked."""
    a = nl.ndarray((128, 128), nl.bfloat16)
    b = nl.ndarray((128, 512), nl.bfloat16)
    nisa.dma_copy(a, x)
    nisa.dma_copy(b, y)
    acc = nl.ndarray((128, 512), nl.float32, nl.psum)
    for i in range(count):
        if tiled:
            group = nl.ds(32 * (i % 4), 32)
            where = {"tile_position": (0, 32 * (i % 4)), "tile_size": (128, 32)}
            nisa.nc_matmul(acc[group], a[:, group], b, **where)
        else:
            nisa.nc_matmul(acc, a, b)


@nc.jit
def meeting(x):
    mine, other = [nl.zeros((8, 16), nl.float32) for _ in range(2)]
    rank = 1 - nl.program_id()
    nisa.dma_copy(mine, x)
    nisa.sendrecv(mine, other, rank, rank, 0)
    out = nl.ndarray((2, 8, 16), nl.float32, nl.shared_hbm)
    nisa.dma_copy(out[nl.program_id()], mine)
    return out


def profile(count=1, tiled=False, target="trn2", assume=()):
    x, y = (nc.TensorSpec((128, columns), nl.bfloat16) for columns in (128, 512))
    run = nc.simulate(matmuls, x, y, count, tiled, mode="trace", target=target, assume=assume)
    return run.profile


def matmul_ns(profile):
    core = profile.schedule.cores[0]
    ends = zip(core.issued, core.start, core.end, strict=True)
    return [end - start for (template, *_), start, end in ends if template.opcode == "nc_matmul"]


def test_a_matmul_takes_as_many_cycles_to_issue_as_profiles_say():
    (ns,) = matmul_ns(profile(assume="throttling"))
    assert ns == pytest.approx(MATMUL_NS + 9.7 / 2.4)
    (ns,) = matmul_ns(profile(assume=("throttling", "matmul-issue")))
    assert ns == pytest.approx(MATMUL_NS / 0.9092)


def test_the_tensor_engine_begins_at_half_its_rate_and_reaches_it_when_it_is_used():
    usual = matmul_ns(profile(20, assume="throttling"))
    slowed = matmul_ns(profile(20))
    # at half the rate they take 1.25 windows of 3.4 us to have 3/8 of one behind half a window
    half = 2 * MATMUL_NS  # which hides the issue of the next
    assert slowed == pytest.approx([half if i <= 10 else ns for i, ns in enumerate(usual)])


@nc.jit
def uses(x, y, count, columns):
    """`count` times eight matmuls of 512 columns, and VectorE before the next."""
    x_sb = nl.ndarray((128, 128), nl.bfloat16)
    y_sb = nl.ndarray((128, 512), nl.bfloat16)
    other_sb = nl.ndarray((128, columns), nl.float32)
    nisa.dma_copy(x_sb, x)
    nisa.dma_copy(y_sb, y)
    nisa.memset(other_sb, 1.0, engine=nisa.vector_engine)
    for _ in range(count):
        y_psum = nl.ndarray((128, 512), nl.float32, nl.psum)
        for k in range(8):
            nisa.nc_matmul(y_psum, x_sb, y_sb, accumulate=k > 0)
        nisa.tensor_copy(other_sb[:, :1], y_psum[:, :1], engine=nisa.vector_engine)
        half = {"op0": nl.multiply, "operand0": 0.5, "engine": nisa.vector_engine}
        nisa.tensor_scalar(other_sb, other_sb, **half)
        nisa.tensor_copy(y_sb[:, :1], other_sb[:, columns - 1 :], engine=nisa.vector_engine)


def test_a_throttled_engine_goes_on_at_half_its_rate_where_it_is_used_little():
    """Profiles of trn2: windows after 3/8 of their use are at the full rate, and no others."""
    x, y = (nc.TensorSpec((128, columns), nl.bfloat16) for columns in (128, 512))
    for columns, rate in ((64, 1.0), (1500, 0.5)):
        run = nc.simulate(uses, x, y, 40, columns, mode="trace", target="trn2")
        core = run.profile.schedule.cores[0]
        firsts = [
            at for (each, *_), at in zip(core.issued, core.start, strict=True)
            if each.opcode == "nc_matmul"
        ][::8]  # fmt: skip
        use = 8 * MATMUL_NS / (firsts[-1] - firsts[-2])
        assert (use >= 3 / 8) == (rate == 1.0), use
        assert matmul_ns(run.profile)[-1] == pytest.approx(MATMUL_NS / rate, rel=0.03)


def test_columns_count_as_use_and_their_issue_does_not():
    recent = RecentUse(Throttle(window_ns=1000.0, use=0.45, rate=0.5))
    at = 0.0
    for _ in range(50):
        at += recent.slowed(at, 100.0, 0.0)
    assert recent.slowed(at, 100.0, 0.0) == 100.0
    took = [recent.slowed(at + 100.0 * n, 40.0, 30.0) for n in range(1, 50)]
    assert (took[0], took[-1]) == (70.0, 80.0)  # 0.4 of the time columns, 0.7 with issue


def test_what_would_help_knows_of_throttling():
    full = profile(20, assume="throttling")
    assert "throttling" not in {entry.resource for entry in full.what_if}
    (entry,) = [entry for entry in profile(20).what_if if entry.resource == "throttling"]
    assert entry.time_ms == pytest.approx(full.time_ms)


def test_a_throttled_engine_that_waits_is_slow_again():
    def kernel(x, y):
        matmuls.func(x, y, 20)
        late = nl.ndarray((128, 512), nl.bfloat16)
        for _ in range(16):  # each waits for the one before
            nisa.dma_copy(late, y)
        nisa.nc_matmul(nl.ndarray((128, 512), nl.float32, nl.psum), late[:, :128], late)

    x, y = (nc.TensorSpec((128, columns), nl.bfloat16) for columns in (128, 512))
    *_, before, last = matmul_ns(nc.simulate(kernel, x, y, mode="trace", target="trn2").profile)
    assert before == pytest.approx(MATMUL_NS + 9.7 / 2.4)
    assert last == pytest.approx(2 * MATMUL_NS)


def test_column_groups_wait_for_each_other():
    side_by_side, serial = [
        profile(16, tiled=True, assume=("throttling", *assume)).time_ms
        for assume in ((), ("column-groups",))
    ]
    whole = sum(matmul_ns(profile(16, assume="throttling"))) / 1e6
    assert serial - side_by_side == pytest.approx(whole * 3 / 4, rel=0.15)


def test_loads_wait_in_one_queue():
    own, shared = [profile(assume=assume) for assume in ((), ("dma-queues",))]
    (first, second), (_, later) = [each.schedule.cores[0].start[:2] for each in (own, shared)]
    assert later - first == pytest.approx(830)
    assert second < later


def test_an_instruction_starts_when_its_engine_has_begun_to_read():
    @nc.jit
    def kernel(x):
        x_sb = nl.ndarray((128, 512), nl.float32)
        nisa.dma_copy(x_sb, x)
        for engine in (nisa.vector_engine, nisa.scalar_engine):
            for _ in range(2):
                out = nl.ndarray((128, 512), nl.float32)
                nisa.tensor_scalar(out, x_sb, nl.multiply, 2.0, engine=engine)

    x = nc.TensorSpec((128, 512), nl.float32)
    starts = [
        nc.simulate(kernel, x, mode="trace", target="trn2", assume=assume)
        .profile.schedule.cores[0].start
        for assume in ((), ("engine-issue",))
    ]  # fmt: skip
    usual, later = [[at[2] - at[1], at[4] - at[3]] for at in starts]
    assert [b - a for a, b in zip(usual, later, strict=True)] == pytest.approx(
        [60 / 0.96, 60 / 1.2], rel=1e-4
    )


def test_a_quicker_dma_engine_has_no_more_than_its_share_of_hbm():
    trn2 = MACHINES["trn2"]
    assert assuming(trn2, ["dma-rate"]).dma_peak_gbps == pytest.approx(414.8, abs=0.1)
    for names in (["dma-rate", "hbm"], ["hbm", "dma-rate"]):
        assert assuming(trn2, names).dma_peak_gbps == pytest.approx(2900 / 8)


def test_two_cores_meet_later():
    x = nc.TensorSpec((8, 16), nl.float32)
    early, late = [
        nc.simulate(meeting[2], x, mode="trace", target="trn2", assume=assume).profile.time_ms
        for assume in ((), ("core-exchange",))
    ]
    assert late - early == pytest.approx(1.3e-3, rel=0.05)


def test_the_other_dma_model_and_a_busy_chip_have_options_of_their_own():
    for name, option in (("dma", {"dma_model": "rows"}), ("hbm", {"cores_busy": 8})):
        x = nc.TensorSpec((128, 128), nl.bfloat16), nc.TensorSpec((128, 512), nl.bfloat16)
        run = nc.simulate(matmuls, *x, 1, mode="trace", target="trn2", **option)
        assert profile(assume=(name,)).time_ms == run.profile.time_ms


def test_the_range_holds_every_end():
    found = profile(40, tiled=True)
    times = {end.name: end.time_ms for end in found.uncertainties}
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert times["column-groups"] > found.time_ms > times["throttling"]
    low, high = found.time_range_ms
    assert low <= min(times.values()) <= max(times.values()) < high


def test_the_range_holds_what_one_end_hides():
    def negated(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        for i in range(8):
            tile = nl.ndarray((128, 512), x.dtype)
            nisa.dma_copy(tile, x[i])
            for _ in range(6):  # in program order the loads are early
                nisa.activation(tile, nl.copy, tile, scale=-1.0)
            nisa.dma_copy(out[i], tile)

    x = nc.TensorSpec((8, 128, 512), nl.bfloat16)
    found = nc.simulate(negated, x, mode="trace", target="trn2").profile
    assert found.time_assuming("dma") == found.time_ms
    both = found.time_assuming("dma", "instruction-order")
    assert found.time_range_ms[0] <= both < found.time_assuming("instruction-order")


def test_the_slow_end_has_the_order_of_the_program():
    """What hides behind it counts, and list scheduling, which is taken where it is quicker, not."""

    def time_on(machine):
        if not machine.shared_queues:
            return 1.0
        return 3.0 + (machine.engine_issue_cycles > 0) - 1.5 * machine.reorders

    machine = MACHINES["trn2"]
    ends = uncertain.other_ends(machine, time_on)
    assert {end.name for end in ends if end.time_ms != 1.0} == {"dma-queues"}
    assert uncertain.together(machine, time_on, ends) == (1.0, 4.0)


def test_another_order_may_fill_the_reserve():
    """Where the program's order needs more than plans do, and another one more than kernels may."""

    def scaled(x):
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        kept = [nl.ndarray((128, 21_500), x.dtype) for _ in range(4)]
        for tile in kept:
            nisa.memset(tile, 1.0)
        for i in range(3):
            tile = nl.ndarray((128, 4000), x.dtype)
            nisa.dma_copy(tile, x[i])
            for k in range(8):  # longer than all loads
                added = kept[k % 4][:, 0:4000]
                nisa.tensor_tensor(tile, tile, added, nl.add, engine=nisa.vector_engine)
            nisa.dma_copy(out[i], tile)

    x = nc.TensorSpec((3, 128, 4000), nl.bfloat16)
    found = nc.simulate(scaled, x, mode="trace", target="trn1").profile
    assert TRN1.planned_sbuf_bytes < found.sbuf_peak_bytes <= TRN1.usable_sbuf_bytes
    least = found.time_assuming("sbuf-reserve", "instruction-order")
    assert found.time_range_ms[0] <= least < found.time_ms


@pytest.mark.parametrize("target", MACHINES)
def test_ends_that_change_nothing_on_a_machine_are_left_out(target):
    machine = MACHINES[target]
    names = {end.name for end in profile(target=target).uncertainties}
    assert names == {u.name for u in UNCERTAINTIES if u.other(machine) != machine}
    assert ("throttling" in names) == (target != "trn1")
    assert assuming(machine, [u.name for u in UNCERTAINTIES]).target == target


def test_the_command_shows_and_takes_them(simulate, file):
    command = (f"{file}:scale", *X)
    page = simulate(*command).page()
    assert "What is not known" in page
    assert all(u.name in page for u in UNCERTAINTIES if u.name != "dma")
    found = simulate(*command, "--assume", "hbm", "--json").document()
    low, high = found["time_range_ms"]
    assert low <= found["time_ms"] <= high
    assert {end["name"] for end in found["uncertainties"]} >= {"throttling", "column-groups"}
    refused(simulate(*command, "--assume", "weather"), "assume must be of dma, dma-rate")
