"""``autotune bench``: benchmarks of this project, reported as ratios within one run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import (
    EngineOption,
    FixedCostOption,
    JsonOption,
    LeanOption,
    MeshOption,
    RanksOption,
    RunsOption,
    SeedOption,
    StepsOption,
    TotalCostOption,
)
from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

app = typer.Typer(help="Benchmarks; results are written to runs/benchmarks/<device>/.", no_args_is_help=True)
# Benchmarks that need no run of another command. Those that need a library or a GPU are added if it is present.
ALL = (
    "overhead",
    "profile",
    "solver",
    "simulator",
    "attach",
    "batching",
    "search",
    "storages",
    "peers",
    "operations",
    "published",
)


@app.callback()
def _group() -> None:
    """Make ``bench`` a group of commands."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The arguments of every benchmark: the console, the progress bars, and the folder of runs."""

    output: Console
    bars: shared.Bars
    runs: Path


@dataclass(frozen=True, slots=True)
class _Measured:
    """The result of a benchmark.

    Attributes:
        name: name of its file, without suffix.
        document: content of its file.
        lines: sentences to print; the path of the file is appended to the last one.
        draw: function that draws the document to a PNG file next to the JSON file; ``None`` for no figure.
    """

    name: str
    document: dict[str, Any]
    lines: list[str]
    draw: Callable[[dict[str, Any], Path], object] | None = None


def _bench(measure: Callable[..., _Measured]) -> Callable[..., _Measured]:
    """Register a benchmark under its function's name; all of them take ``--runs-dir`` and ``--json``.

    Args:
        measure: runs the benchmark; its parameters are a :class:`_Run` and the benchmark's own options.
    """

    def command(runs_dir: RunsOption = shared.RUNS, as_json: JsonOption = False, **options: Any) -> None:
        from autotune.bench.harness import write_document
        from autotune.records.run_directory import require_writable

        require_writable(runs_dir)
        output = shared.console(as_json=as_json)
        with shared.Bars(output) as bars:
            result = measure(_Run(output, bars, runs_dir), **options)
        path, document = write_document(result.name, result.document, runs_dir)
        if as_json:
            shared.print_json(document)
        *others, last = result.lines
        for line in (*others, f"{last}; written to {path}"):
            output.print(line, soft_wrap=True)
        if result.draw is not None:
            result.draw(document, path.with_suffix(".png"))

    own = [*inspect.signature(measure, eval_str=True).parameters.values()][1:]
    common = [*inspect.signature(command, eval_str=True).parameters.values()][:2]
    command.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    command.__doc__ = measure.__doc__
    app.command(measure.__name__)(command)
    return measure


@_bench
def overhead(
    run: _Run,
    job: Annotated[str, typer.Option("--job", help="The job to train.")] = "charlm",
    pairs: Annotated[int, typer.Option("--pairs", min=2, max=10_000, help="Pairs of blocks of ten steps.")] = 8,
    engine: EngineOption = "torch",
    ranks: RanksOption = None,
    zero_stage: Annotated[int, typer.Option("--zero-stage", min=0, max=3, help="With deepspeed: the stage.")] = 2,
    mesh: MeshOption = None,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare the engine's step time with that of a hand-written loop of the same job, in interleaved blocks."""
    from autotune.bench.bench_overhead import bench_overhead, lines
    from autotune.bench.bench_ranks import bench_ranks
    from autotune.catalog import load_job

    options = shared.ranks(engine, ranks, str(zero_stage) if engine == "deepspeed" else "0", None, mesh)
    common: dict[str, Any] = {"pairs": pairs, "seed": seed, "reporter": run.bars}
    document = bench_overhead(load_job(job), **common) if options is None else bench_ranks(job, options, **common)
    kind = "" if options is None else f"-{options.layout.replace('-', '')}"
    return _Measured(f"overhead-{document['job']}{kind}", document, lines(document))


@_bench
def pipelines(
    run: _Run,
    job: Annotated[str, typer.Option("--job", help="The job to train.")] = "charlm",
    ranks: Annotated[int, typer.Option("--ranks", min=2, max=256, help="Number of ranks on this machine.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Turns of each layout at each k.")] = 6,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare predicted steps and bubbles of pipelines with real ones, and the chosen layout with all others."""
    from autotune.bench.bench_pipelines import bench_pipelines, lines

    document = bench_pipelines(job, ranks=ranks, rounds=rounds, seed=seed, reporter=run.bars)
    return _Measured(f"pipelines-{document['job']}-{ranks}", document, lines(document))


@_bench
def solver(
    run: _Run,
    instances: Annotated[
        int,
        typer.Option("--instances", min=1, max=100_000, help="Small jobs that are also solved by brute force."),
    ] = 100,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare the solvers with brute force on small jobs, and time the exact solver on 1,000 units."""
    from autotune.bench.bench_solver import bench_solver, lines

    document = bench_solver(instances=instances, seed=seed, reporter=run.bars)
    return _Measured("solver", document, lines(document))


@_bench
def simulator(
    run: _Run,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=shared.LONGEST_S, help="Seconds for which the rate is measured.")
    ] = 10.0,
    job: Annotated[str | None, typer.Option("--job", help="Also rank this job's plans against real runs.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Number of real runs of each plan.")] = 3,
    seed: SeedOption = 0,
) -> _Measured:
    """Count simulated decisions per second; with --job, compare predicted and real times to the target."""
    from autotune.bench.bench_simulator import bench_simulator, lines, rank_plans
    from autotune.catalog import load_job
    from autotune.records.protocol import paired_seeds

    found = None if job is None else load_job(job)
    document = bench_simulator(seconds=seconds, seed=seed, reporter=run.bars)
    if found is not None:
        document["ranking"] = rank_plans(found, run.runs, paired_seeds(seeds), reporter=run.bars)
    return _Measured("simulator", document, lines(document))


@_bench
def policy(
    run: _Run,
    jobs: Annotated[int, typer.Option("--jobs", min=2, max=10_000, help="Held-out jobs in each table.")] = 200,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", callback=input_path, help="A policy folder; the shipped one if left out."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", callback=input_path, help="A recipe (.toml) instead of policies/ppo.toml."),
    ] = None,
    train_run: Annotated[
        Path | None,
        typer.Option("--train-run", callback=input_path, help="Run directory of a training: judge all its seeds."),
    ] = None,
    all_storages: Annotated[
        bool, typer.Option("--all-storages", help="Jobs that offer all storages, not only save and recompute.")
    ] = False,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare the policy with the planner, solvers, searches and a clairvoyant, on jobs it was not trained on."""
    from autotune.agents.recipe import read_recipe
    from autotune.bench.bench_policy import bench_policy, lines
    from autotune.campaign.policy_judging import BenchSettings, load_judged
    from autotune.catalog import content_folder
    from autotune.choices import DEFAULT_STORAGES, STORAGES

    folder = content_folder("policies")
    found, judged = read_recipe(recipe or folder / "ppo.toml"), load_judged(policy or folder / "ppo", train_run)
    settings = BenchSettings(jobs=jobs, seed=seed, storages=STORAGES if all_storages else DEFAULT_STORAGES)
    document = bench_policy(judged, found, settings, reporter=run.bars)
    return _Measured("policy-all-storages" if all_storages else "policy", document, lines(document))


@_bench
def search(
    run: _Run,
    job: Annotated[str, typer.Argument(help="The job to find plans for.")] = "charlm",
    memory_budget: Annotated[
        str, typer.Option("--memory-budget", help="A size (20GiB) or a share of the FP32 baseline's peak (40%).")
    ] = "40%",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Methods, separated by commas; all if left out.")
    ] = None,
    steps: StepsOption = 240,
    repetitions: Annotated[int, typer.Option("--repetitions", max=1000, help="Number of runs of every method.")] = 3,
    rounds: Annotated[
        int, typer.Option("--rounds", max=10_000, help="Number of windows in which each plan is measured again.")
    ] = 6,
    profile_seconds: Annotated[
        float,
        typer.Option("--profile-seconds", min=0.1, max=shared.LONGEST_S, help="About how long a profile may take."),
    ] = 50.0,
    lean: LeanOption = True,
    seed: SeedOption = 0,
) -> _Measured:
    """Count the real steps and seconds until each method's plan is nearly as good as the best one known."""
    from autotune.bench.bench_search import METHODS, SearchBenchSettings, bench_search
    from autotune.bench.search_judging import lines
    from autotune.budget import MemoryBudget
    from autotune.catalog import load_job
    from autotune.profiling.profiler import ProfilerOptions
    from autotune.report.png_figures import draw_search

    found, budget = load_job(job), MemoryBudget.parse(memory_budget)
    settings = SearchBenchSettings(
        methods=tuple(METHODS) if methods is None else tuple(methods.split(",")),
        steps=steps,
        repetitions=repetitions,
        rounds=rounds,
        seed=seed,
        profiler=ProfilerOptions.lean() if lean else ProfilerOptions(seconds=profile_seconds),
    )
    document = bench_search(found, budget, run.runs, settings, reporter=run.bars)
    run.output.print(_search_table(document))
    return _Measured(f"search-{found.name}", document, lines(document), draw_search)


def _search_table(document: dict[str, Any]) -> Table:
    """Return a table with one row per method: steps and seconds to a good plan, and how good its final plan is."""
    from autotune.bench.search_judging import shown

    table = shared.table(
        title=f"{document['job']} within {document['memory_budget']}: until the best plan so far is within "
        f"{document['within_frac']:.0%} of the best plan known; medians of {len(document['seeds'])}, each in brackets",
        title_justify="left",
    )
    for name in ("method", "real steps", "seconds", "answer slower than the best by"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, method in document["methods"].items():
        cells = []
        for unit in ("steps", "seconds"):
            single = [
                f"> {limit:,.0f}" if value is None else f"{value:,.0f}"
                for value, limit in zip(method[unit]["values"], method[unit]["limits"], strict=True)
            ]
            cells.append(f"{shown(method[unit])} ({', '.join(single)})")
        regrets = [method["regret_frac"]["median"], *method["regret_frac"]["values"]]
        first, *others = ["no plan" if regret is None else f"{regret:.1%}" for regret in regrets]
        table.add_row(name, *cells, f"{first} ({', '.join(others)})")
    table.caption = (
        f"{len(document['plans'])} plans measured again; two halves of the rounds differ by "
        f"{document['repeat_difference_frac']:.1%} (median)"
    )
    return table


@_bench
def peers(
    run: _Run,
    job: Annotated[str, typer.Option("--job", help="The job to train.")] = "charlm:brief",
    memory_budgets: Annotated[
        str,
        typer.Option(
            "--memory-budgets", help="Sizes (20GiB) or shares of the FP32 baseline's peak (40%), separated by commas."
        ),
    ] = "100%,60%,40%,30%,20%",
    peers: Annotated[
        str | None,
        typer.Option("--peers", help="Techniques (sqrt,compile) or settings (compile-blocks-0.2); all if left out."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", max=10_000, help="Number of windows of each arm, in turn.")] = 8,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, help="Torch threads of each arm; torch's default.")
    ] = None,
    lean: LeanOption = True,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare torch.compile, checkpointing rules and uniform bf16, each at its best k, with our plans in one run."""
    from autotune.bench.bench_peers import PeerBenchSettings, bench_peers, lines
    from autotune.bench.peer_engine import PEERS
    from autotune.budget import MemoryBudget
    from autotune.profiling.profiler import ProfilerOptions

    settings = PeerBenchSettings(
        budgets=tuple(MemoryBudget.parse(text) for text in memory_budgets.split(",")),
        peers=tuple(PEERS) if peers is None else tuple(peers.split(",")),
        rounds=rounds,
        seed=seed,
        threads=threads,
        profiler=ProfilerOptions.lean() if lean else ProfilerOptions(),
    )
    document = bench_peers(job, run.runs, settings, run.bars)
    run.output.print(_peers_table(document))
    return _Measured("peers", document, lines(document))


@_bench
def storages(
    run: _Run,
    job: Annotated[str, typer.Option("--job", help="The job to train.")] = "charlm:brief",
    rounds: Annotated[int, typer.Option("--rounds", max=10_000, help="Number of windows of each plan, in turn.")] = 6,
    seed: SeedOption = 0,
) -> _Measured:
    """Measure each storage in all units, in each precision: time and peak beside saving all."""
    from autotune.bench.bench_storages import bench_storages, lines
    from autotune.catalog import load_job

    document = bench_storages(load_job(job), rounds=rounds, seed=seed, reporter=run.bars)
    return _Measured("storages", document, lines(document))


def _peers_table(document: dict[str, Any]) -> Table:
    """Return a table with one row per budget and family, the fastest of a budget first."""
    from autotune.budget import format_bytes

    base = document["baseline"]
    table = shared.table(
        title=f"{document['job']}: the best arm of each within shares of {format_bytes(base['peak_bytes'])}; ratios "
        f"to the fastest of a budget over {document['rounds']} rounds",
        title_justify="left",
    )
    for name in ("within", "arm", "ms per step", "ratio", "peak", "compiling, s", "loss"):
        table.add_column(name, justify="left" if name == "arm" else "right", overflow="fold")
    former = None
    for row in filter(itemgetter("fits"), document["arms"]):
        begins, former = row["budget_frac"] != former, row["budget_frac"]
        if begins:
            table.add_section()
        low, high = row["over_fastest"]["ratio_ci95"]
        table.add_row(
            f"{row['budget_frac']:.0%}" if begins else "",
            row["name"],
            f"{1000 * row['seconds_per_step']:.1f}",
            f"{row['over_fastest']['ratio_median']:.2f} [{low:.2f}, {high:.2f}]",
            f"{row['peak_bytes'] / base['peak_bytes']:.1%}",
            f"{row['compile_s']:.1f}",
            f"{row['loss']:.4f}",
        )
    return table


@_bench
def attach(
    run: _Run,
    jobs: Annotated[str, typer.Option("--jobs", help="Jobs whose overhead is measured, or none.")] = (
        "charlm,digits_deep"
    ),
    situations: Annotated[str, typer.Option("--situations", help="Situations to compare in, or none.")] = (
        "mixed lengths,curriculum,moving budget"
    ),
    followed: Annotated[
        str,
        typer.Option(
            "--followed",
            help="Jobs and situations whose live runs are repeated unattached under the same plans; or none.",
        ),
    ] = "charlm,digits_deep,charlm_long:adaptive,mixed lengths with k free,moving budget with k free",
    steps: Annotated[
        int, typer.Option("--steps", min=20, max=shared.MOST_STEPS, help="Batches of each arm for the overhead.")
    ] = 200,
    situation_steps: Annotated[
        int, typer.Option("--situation-steps", min=40, max=shared.MOST_STEPS, help="Steps of each run.")
    ] = 300,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Paired runs of each situation.")] = 6,
    policy: Annotated[str, typer.Option("--policy", help="Policy that is attached in the situations.")] = "ppo",
    seed: SeedOption = 0,
) -> _Measured:
    """Measure the overhead of attaching to a live run, and the gain where no static plan is best throughout."""
    from autotune.bench.bench_attach import bench_attach, lines

    named = [[] if text == "none" else text.split(",") for text in (jobs, situations, followed)]
    if not any(named):
        raise InputError(
            "jobs, situations and followed are all none", where="bench attach", allowed="at least one of them"
        )
    document = bench_attach(
        named[0],
        named[1],
        steps=steps,
        situation_steps=situation_steps,
        seeds=seeds,
        policy=policy,
        seed=seed,
        followed=named[2],
        reporter=run.bars,
    )
    parts = [name for name in ("overhead", "situations", "followed") if document[name]]
    return _Measured("-".join(["attach", *(parts if len(parts) < 3 else [])]), document, [*lines(document), "done"])


@_bench
def batching(
    run: _Run,
    job: Annotated[
        str, typer.Argument(help="A job whose batching is adaptive, or whose batches are cut by tokens.")
    ] = "charlm_long:adaptive",
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=1000, help="Number of paired runs, or of turns at each k.")
    ] = 6,
    policy: Annotated[str, typer.Option("--policy", help="Policy that is attached.")] = "ppo",
    fixed_cost: FixedCostOption = None,
    cost: TotalCostOption = None,
) -> _Measured:
    """Compare constant numbers of batches per step with a live run, or cutting by samples with cutting by tokens.

    The live run follows the gradient's noise. A job that is cut by tokens is compared with itself, cut by samples. With
    --fixed-cost, constants are compared at equal cost with ramps: plain, by the noise scale, and as 'ramp' finds them.
    """
    from autotune.bench import bench_cutting, bench_ramp
    from autotune.bench.bench_batching import bench_growing_noise, lines
    from autotune.catalog import load_job

    loaded = load_job(job)
    if cost is not None and fixed_cost is None:
        raise InputError("--cost is given without --fixed-cost", where="bench batching", allowed="both, or neither")
    if fixed_cost is not None:
        document = bench_ramp.bench_ramp(
            loaded, fixed_samples=fixed_cost, total_samples=cost, seeds=seeds, reporter=run.bars
        )
        return _Measured(f"ramp-{document['job']}-{fixed_cost:g}", document, bench_ramp.lines(document))
    if loaded.split == "tokens":
        document = bench_cutting.bench_cutting(loaded, rounds=seeds, reporter=run.bars)
        return _Measured(f"cutting-{document['job']}", document, bench_cutting.lines(document))
    document = bench_growing_noise(job, seeds=seeds, policy=policy, reporter=run.bars)
    return _Measured(f"batching-{document['job']}", document, lines(document))


@_bench
def cluster(
    run: _Run,
    job: Annotated[str, typer.Option("--job", help="The job whose plans are tried.")] = "digits",
    address: Annotated[str, typer.Option("--cluster", help="local:N, auto, or ray://HOST:PORT.")] = "local:2",
    worker_cores: Annotated[
        int, typer.Option("--worker-cores", min=1, max=1024, help="Number of cores that each worker is pinned to.")
    ] = 1,
    pairs: Annotated[
        int, typer.Option("--pairs", min=2, max=10_000, help="Number of pairs of turns: one worker, all workers.")
    ] = 6,
    windows: Annotated[int, typer.Option("--windows", min=4, max=shared.MOST_STEPS, help="Trials in each turn.")] = 24,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare the trials per minute of one worker with those of all workers of a cluster, in alternating turns."""
    from autotune.bench.bench_cluster import bench_cluster, lines
    from autotune.engines.ray_cluster import ClusterOptions

    options = ClusterOptions(address=address, cores=worker_cores)
    document = bench_cluster(job, options, pairs=pairs, windows=windows, seed=seed, reporter=run.bars)
    return _Measured(f"cluster-{Path(job).stem}", document, lines(document))


@_bench
def profile(
    run: _Run,
    jobs: Annotated[str, typer.Option("--jobs", help="Jobs, separated by commas.")] = "charlm,digits",
    plans: Annotated[
        int, typer.Option("--plans", min=2, max=10_000, help="Number of random plans that are predicted and measured.")
    ] = 20,
    seed: SeedOption = 0,
) -> _Measured:
    """Compare the predictions of a lean and of a full profile with measurements of random plans."""
    from autotune.bench.bench_profile import bench_profile, lines
    from autotune.catalog import load_job

    document = bench_profile([load_job(name) for name in jobs.split(",")], plans=plans, seed=seed, reporter=run.bars)
    return _Measured("profile", document, lines(document))


@_bench
def operations(
    run: _Run,
    jobs: Annotated[str, typer.Option("--jobs", help="Jobs, separated by commas.")] = "charlm,digits,digits_deep",
    count: Annotated[
        int,
        typer.Option("--runs", min=2, max=10_000, help="Runs under random plans in all; the paper analysed 150."),
    ] = 24,
    seed: SeedOption = 0,
) -> _Measured:
    """Split the errors of predictions by kind of operation, and by whether memory or computing bounds it."""
    from autotune.bench.bench_operations import bench_operations, lines
    from autotune.catalog import load_job

    found = [load_job(name) for name in jobs.split(",")]
    document = bench_operations(found, runs=count, runs_dir=run.runs, seed=seed, reporter=run.bars)
    return _Measured("operations", document, lines(document))


@_bench
def published(
    run: _Run,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            callback=input_path,
            help="A folder of CSV files of published runs; the package's own if left out.",
        ),
    ] = None,
    left_out: Annotated[
        bool,
        typer.Option("--left-out/--no-left-out", help="Also predict each source and model by a fit without it."),
    ] = True,
) -> _Measured:
    """Compare predictions for training on many devices with published runs, and with other rules."""
    from autotune.bench.bench_published import bench_published, lines
    from autotune.report.png_figures import draw_published

    document = bench_published(data, left_out=left_out, reporter=run.bars)
    run.output.print(_published_table(document))
    name = "published" if data is None else f"published-{data.resolve().name}"
    return _Measured(name, document, lines(document), draw=draw_published)


def _published_table(document: dict[str, Any]) -> Table:
    """Return a table of errors by source, and of other rules on the same rows."""
    table = shared.table(
        title="Estimates against published runs: errors, median and 90th percentile", title_justify="left"
    )
    for name in ("", "throughput", "peak", "refused"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    sources = {f"source {name}": one for name, one in document["by"]["source"].items()}
    for name, one in {**sources, **document["peers"]}.items():
        if name == "autotune plan":
            table.add_section()
        errors = [
            ""
            if one[f"{key}_error_median"] is None
            else f"{one[f'{key}_error_median']:.1%}, {one[f'{key}_error_p90']:.1%}"
            for key in ("throughput", "peak")
        ]
        table.add_row(name, *errors, "" if one["wrongly_refused"] is None else str(one["wrongly_refused"]))
    return table


@app.command("all")
def every(runs_dir: RunsOption = shared.RUNS) -> None:
    """Run all benchmarks that need no run of another command, one after another, with their defaults."""
    import importlib.util

    from autotune.mechanics.devices import device_kind

    names = [*ALL]
    names += ["cluster"] if importlib.util.find_spec("ray") is not None else []
    names += ["gpu"] if device_kind() != "cpu" else []
    for name in names:
        shared.console(as_json=False).print(f"autotune bench {name}")
        app([name, "--runs-dir", str(runs_dir)], standalone_mode=False)


@app.command("gpu")
def gpu(
    jobs: Annotated[
        str | None,
        typer.Option("--jobs", help="Jobs, separated by commas (default: GPT-2 small, ResNet-50 and a 1.3 B GPT)."),
    ] = None,
    arms: Annotated[
        str | None, typer.Option("--arms", help="Arms, separated by commas, in order; all if left out.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", callback=input_path, help="A folder with WikiText-2 and CIFAR-10; random data if left out."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="This machine's accelerator if left out; cpu to try the command on small jobs."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", max=10_000, help="Windows in which each plan is measured.")] = 4,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=10, max=shared.LONGEST_S, help="Time limit in seconds."),
    ] = 540.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; runs/benchmarks/<device>/gpu.json if left out."),
    ] = None,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Check predictions, then measure plans within 100, 60, 40 and 30 % of the baseline's memory."""
    began = time.monotonic()
    from autotune.bench.bench_gpu import GpuBenchSettings, bench_gpu, lines
    from autotune.errors import EngineError
    from autotune.io.files import write_json
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir if out is None else out.parent, where="" if out is None else f"--out {out}")
    settings = GpuBenchSettings(
        device=device,
        jobs=None if jobs is None else tuple(jobs.split(",")),
        arms=None if arms is None else tuple(arms.split(",")),
        data=None if data is None else str(data),
        rounds=rounds,
        seconds=seconds,
        seed=seed,
    )

    def path(document: dict[str, Any]) -> Path:
        name = "gpu.json" if device != "cpu" else "gpu-command-on-cpu.json"
        return out or runs_dir / "benchmarks" / document.get("folder", "unknown") / name

    def keep(document: dict[str, Any]) -> None:
        path(document).parent.mkdir(parents=True, exist_ok=True)
        write_json(path(document), document)

    with shared.Bars(shared.console(as_json=as_json)) as bars:
        document = bench_gpu(settings, keep=keep, reporter=bars, began=began)
    if as_json:
        shared.print_json(document)
    shared.console(as_json=as_json).print(f"{lines(document)[0]}; written to {path(document)}", soft_wrap=True)
    if document["machine"] is None:
        raise EngineError("the device did not answer")
