"""``autotune bench``: measure the project itself, as ratios within one run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import EngineOption, JsonOption, LeanOption, RanksOption, RunsOption, SeedOption, StepsOption
from autotune.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Benchmarks; results are written to runs/benchmarks/<device>/.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep ``bench`` a group."""


@app.command("overhead")
def overhead(
    job: Annotated[str, typer.Option("--job", help="The job to train.")] = "charlm",
    pairs: Annotated[int, typer.Option("--pairs", min=2, max=10_000, help="Pairs of blocks of ten steps.")] = 8,
    engine: EngineOption = "torch",
    ranks: RanksOption = None,
    zero_stage: Annotated[int, typer.Option("--zero-stage", min=0, max=3, help="With deepspeed: the stage.")] = 2,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare the engine's step with a hand-written loop of the same job, interleaved."""
    from autotune.bench.bench_deepspeed import bench_deepspeed
    from autotune.bench.bench_overhead import bench_overhead
    from autotune.catalog import load_job
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    asked = shared.ranks(engine, ranks, str(zero_stage) if engine == "deepspeed" else "0", None)
    found = load_job(job)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"{found.name}: engine against a plain loop", pairs)
        if asked is not None:
            document = bench_deepspeed(
                job, ranks=asked.count, zero_stage=zero_stage, pairs=pairs, seed=seed, on_pair=bars.advance
            )
        else:
            document = bench_overhead(found, pairs=pairs, seed=seed, on_pair=bars.advance)
    low, high = document["ratio_ci95"]
    line = (
        f"engine / plain loop = {document['ratio_median']:.4f} (median of {document['pairs']} pairs, 95 % interval "
        f"{low:.4f} to {high:.4f})"
    )
    kind = f"-zero{zero_stage}" if engine == "deepspeed" else ""
    _finish(document, f"overhead-{found.name}{kind}", line, runs_dir, as_json)


@app.command("solver")
def solver(
    instances: Annotated[
        int, typer.Option("--instances", min=1, max=100_000, help="Small jobs to solve by brute force too.")
    ] = 100,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare the solvers with brute force on small jobs, and time the exact one on 1,000 units."""
    from autotune.bench.bench_solver import bench_solver
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"{instances} small jobs by brute force, then 1,000 units", instances)
        document = bench_solver(instances=instances, seed=seed, on_instance=bars.advance)
    line = (
        f"exact solver: {document['gap_to_brute_force_max']:.2e} from brute force at worst; 1,000 units in "
        f"{document['seconds_1000_units']:.2f} s per k. Price solver: {document['price_solver_gap_median']:.2%} "
        f"(median), {document['price_solver_gap_p95']:.2%} (p95)"
    )
    _finish(document, "solver", line, runs_dir, as_json)


@app.command("simulator")
def simulator(
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=shared.LONGEST_S, help="How long each rate is measured.")
    ] = 10.0,
    job: Annotated[str | None, typer.Option("--job", help="Also rank this job's plans against real runs.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Real runs of each plan.")] = 3,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Count simulated decisions per second; with --job, compare predicted with real times to the target."""
    from autotune.bench.bench_simulator import bench_simulator, rank_plans
    from autotune.catalog import load_job
    from autotune.records.protocol import paired_seeds
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    found = None if job is None else load_job(job)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage("simulate", 1)
        document = bench_simulator(seconds=seconds, seed=seed)
        if found is not None:
            bars.stage(f"{found.name}: real runs of five plans", 1)
            document["ranking"] = rank_plans(found, runs_dir, paired_seeds(seeds))
    line = f"{document['decisions_per_s']:,.0f} decisions/s"
    if found is not None:
        line += f"; rank correlation with real runs of {found.name}: {document['ranking']['rank_correlation']:.2f}"
    _finish(document, "simulator", line, runs_dir, as_json)


@app.command("policy")
def policy(
    jobs: Annotated[int, typer.Option("--jobs", min=2, max=10_000, help="Held-out jobs in each table.")] = 200,
    policy: Annotated[
        Path | None, typer.Option("--policy", callback=input_path, help="A policy folder; the shipped one if left out.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", callback=input_path, help="A recipe (.toml); policies/ppo.toml.")
    ] = None,
    train_run: Annotated[
        Path | None,
        typer.Option("--train-run", callback=input_path, help="A training's run directory: judge all of its seeds."),
    ] = None,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Judge the policy on jobs that it was not trained on, against planner, solvers, searches and a clairvoyant."""
    from autotune.agents.recipe import read_recipe
    from autotune.bench.bench_policy import bench_policy
    from autotune.campaign.policy_judging import BenchSettings, load_judged
    from autotune.catalog import content_folder
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    folder = content_folder("policies")
    found, judged = read_recipe(recipe or folder / "ppo.toml"), load_judged(policy or folder / "ppo", train_run)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"{jobs} held-out jobs, standing still and moving", 1.0)
        document = bench_policy(judged, found, BenchSettings(jobs=jobs, seed=seed), on_part=bars.advance)
    everything = document["dynamic"]["all"]
    won = everything["methods"]["ppo"]
    low, high = won["won_ci95"]
    line = (
        f"moving jobs: {won['won_percent']:+.2f} % of time against the planner (95 % interval {low:+.2f} to "
        f"{high:+.2f}), of {everything['headroom_percent']:.1f} % that a clairvoyant would win; standing still: "
        f"{document['methods']['ppo']['regret_p95']:.2f} % off the exact optimum (p95)"
    )
    _finish(document, "policy", line, runs_dir, as_json)


@app.command("search")
def search(
    job: Annotated[str, typer.Argument(help="The job to find plans for.")] = "charlm",
    memory_budget: Annotated[
        str, typer.Option("--memory-budget", help="A size (20GiB) or a share of the FP32 baseline's peak (40%).")
    ] = "40%",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Some methods only, separated by commas; all if left out.")
    ] = None,
    steps: StepsOption = 240,
    repetitions: Annotated[int, typer.Option("--repetitions", max=1000, help="How often every method is run.")] = 3,
    rounds: Annotated[
        int, typer.Option("--rounds", max=10_000, help="Windows in which each plan is measured again.")
    ] = 6,
    profile_seconds: Annotated[
        float,
        typer.Option("--profile-seconds", min=0.1, max=shared.LONGEST_S, help="About how long a profile may take."),
    ] = 50.0,
    lean: LeanOption = True,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Count the real steps and seconds that each method spends until its plan is nearly the best one known."""
    from autotune.bench.bench_search import METHODS, SearchBenchSettings, bench_search
    from autotune.bench.search_judging import verdict
    from autotune.budget import MemoryBudget
    from autotune.catalog import load_job
    from autotune.profiling.profiler import ProfilerOptions
    from autotune.records.run_directory import benchmark_folder, require_writable
    from autotune.report.figures import draw_search

    require_writable(runs_dir)
    found, budget = load_job(job), MemoryBudget.parse(memory_budget)
    settings = SearchBenchSettings(
        methods=tuple(METHODS) if methods is None else tuple(methods.split(",")),
        steps=steps,
        repetitions=repetitions,
        rounds=rounds,
        seed=seed,
        profiler=ProfilerOptions.lean() if lean else ProfilerOptions(seconds=profile_seconds),
    )
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        document = bench_search(found, budget, runs_dir, settings, reporter=bars)
    output.print(_search_table(document))
    _finish(document, f"search-{found.name}", verdict(document), runs_dir, as_json)
    draw_search(document, benchmark_folder(Path(runs_dir)) / f"search-{found.name}.png")


@app.command("attach")
def attach(
    jobs: Annotated[str, typer.Option("--jobs", help="Jobs whose overhead is measured; none for none.")] = (
        "charlm,digits_deep"
    ),
    situations: Annotated[str, typer.Option("--situations", help="Situations to compare in; none for none.")] = (
        "mixed lengths,curriculum,moving budget"
    ),
    followed: Annotated[
        str,
        typer.Option(
            "--followed",
            help="Jobs and situations whose live runs an unattached copy follows under the same plans; none for none.",
        ),
    ] = "charlm,digits_deep,charlm_long:adaptive,mixed lengths with k free,moving budget with k free",
    steps: Annotated[
        int, typer.Option("--steps", min=20, max=shared.MOST_STEPS, help="Batches of each arm for the overhead.")
    ] = 200,
    situation_steps: Annotated[
        int, typer.Option("--situation-steps", min=40, max=shared.MOST_STEPS, help="Steps of each run.")
    ] = 300,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Paired runs of each situation.")] = 6,
    policy: Annotated[str, typer.Option("--policy", help="What is attached in the situations.")] = "ppo",
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Measure what attaching to a live run costs, and what it wins where no static plan can follow."""
    from autotune.bench.bench_attach import bench_attach
    from autotune.bench.bench_followed import line_of
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)

    def listed(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    if not listed(jobs) and not listed(situations) and not listed(followed):
        raise InputError(
            "jobs, situations and followed are all none", where="bench attach", allowed="something to measure"
        )

    with shared.Bars(shared.console(as_json=as_json)) as bars:
        document = bench_attach(
            listed(jobs),
            listed(situations),
            steps=steps,
            situation_steps=situation_steps,
            seeds=seeds,
            policy=policy,
            seed=seed,
            followed=listed(followed),
            reporter=bars,
        )
    output = shared.console(as_json=as_json)
    for entry in document["overhead"]:
        for stage in ("observe", "act"):
            low, high = entry[stage]["ratio_ci95"]
            output.print(
                f"{entry['job']}, {stage}: a step takes {entry[stage]['ratio_median']:.4f} [{low:.4f}, {high:.4f}] of "
                f"an unattached one's time; over 1,000 steps, all included, "
                f"{entry[stage]['ratio_total_1000_steps']:.4f}",
                soft_wrap=True,
            )
    for entry in document["situations"]:
        output.print(
            f"{entry['situation']}: live {_interval(entry['live_over_static'])} and oracle "
            f"{_interval(entry['oracle_over_static'])} of the best static plan's time: "
            f"{entry['share_of_ceiling']['mean']:.0%} of the ceiling; {entry['over_budget_steps']} steps over budget",
            soft_wrap=True,
        )
    for entry in document["followed"]:
        output.print(line_of(entry), soft_wrap=True)
    parts = [name for name in ("overhead", "situations", "followed") if document[name]]
    _finish(document, "-".join(["attach", *(parts if len(parts) < 3 else [])]), "done", runs_dir, as_json)


@app.command("batching")
def batching(
    job: Annotated[str, typer.Argument(help="A job whose batching is adaptive.")] = "charlm_long:adaptive",
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Paired runs.")] = 6,
    policy: Annotated[str, typer.Option("--policy", help="What is attached.")] = "ppo",
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Race steps of always the same number of batches against a live run that follows the gradient's noise."""
    from autotune.bench.bench_batching import bench_growing_noise
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        document = bench_growing_noise(job, seeds=seeds, policy=policy, reporter=bars)
    for name, found in document["constant_over_best"].items():
        output.print(f"{name}: {_interval(found)} of the time of {document['best_constant']}", soft_wrap=True)
    line = (
        f"live: {_interval(document['live_over_best'])} of the time of {document['best_constant']}, the best of these"
    )
    _finish(document, f"batching-{document['job']}", line, runs_dir, as_json)


@app.command("cluster")
def cluster(
    job: Annotated[str, typer.Option("--job", help="The job whose plans are tried.")] = "digits",
    address: Annotated[str, typer.Option("--cluster", help="local:N, auto, or ray://HOST:PORT.")] = "local:2",
    worker_cores: Annotated[
        int, typer.Option("--worker-cores", min=1, max=1024, help="Cores that a worker is pinned to.")
    ] = 1,
    pairs: Annotated[
        int, typer.Option("--pairs", min=2, max=10_000, help="How often one and all workers take turns.")
    ] = 6,
    windows: Annotated[int, typer.Option("--windows", min=4, max=shared.MOST_STEPS, help="Trials in each turn.")] = 24,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare how many trials a minute one worker and all of a cluster's workers manage, in turn."""
    from autotune.bench.bench_cluster import bench_cluster
    from autotune.engines.ray_cluster import ClusterOptions
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    options = ClusterOptions(address=address, cores=worker_cores)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        bars.stage(f"{job}: one worker against all", pairs)
        document = bench_cluster(job, options, pairs=pairs, windows=windows, seed=seed, on_pair=bars.advance)
    rates, (low, high) = document["trials_per_minute"], document["efficiency_ci95"]
    line = (
        f"{rates['one']:.0f} trials a minute with one worker, {rates['all']:.0f} with {document['workers']}: "
        f"efficiency {document['efficiency_median']:.2f} (95 % interval {low:.2f} to {high:.2f})"
    )
    _finish(document, f"cluster-{Path(job).stem}", line, runs_dir, as_json)


def _interval(found: dict[str, Any]) -> str:
    low, high = found["ci95"]
    return f"{found['mean']:.3f} [{low:.3f}, {high:.3f}]"


def _search_table(document: dict[str, Any]) -> Table:
    """Return a row per method: what it spent until it had arrived, and how good its answer is."""
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


@app.command("profile")
def profile(
    jobs: Annotated[str, typer.Option("--jobs", help="Jobs, separated by commas.")] = "charlm,digits",
    plans: Annotated[
        int, typer.Option("--plans", min=2, max=10_000, help="Random plans that are predicted and measured.")
    ] = 20,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Predict plans from a lean and from a full profile, and measure them."""
    from autotune.bench.bench_profile import bench_profile, verdict
    from autotune.catalog import load_job
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir)
    found = [load_job(name) for name in jobs.split(",")]
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        document = bench_profile(found, plans=plans, seed=seed, reporter=bars)
    _finish(document, "profile", verdict(document), runs_dir, as_json)


# What needs no run of another command; those that also need a library, or a GPU, come where they are there.
ALL = ("overhead", "profile", "solver", "simulator", "attach", "batching", "search")


@app.command("all")
def every(runs_dir: RunsOption = shared.RUNS) -> None:
    """Run every benchmark that needs no run of another command, one after another, with its defaults."""
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
        typer.Option("--jobs", help="Jobs, separated by commas; left out, GPT-2 small, ResNet-50 and a GPT of 1.3 B."),
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
        typer.Option("--seconds", min=10, max=shared.LONGEST_S, help="All has ended after so many seconds."),
    ] = 540.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; runs/benchmarks/<device>/gpu.json if left out."),
    ] = None,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Answer whether predictions hold, then measure plans within 100, 60, 40 and 30 % of the baseline's memory."""
    began = time.monotonic()
    from autotune.bench.bench_gpu import GpuBenchSettings, bench_gpu, verdict
    from autotune.errors import EngineError
    from autotune.io.files import write_json
    from autotune.records.run_directory import require_writable

    require_writable(runs_dir if out is None else out.parent, where="" if out is None else f"--out {out}")
    settings = GpuBenchSettings(
        device=device,
        jobs=None if jobs is None else tuple(jobs.split(",")),
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
    shared.console(as_json=as_json).print(f"{verdict(document)}; written to {path(document)}", soft_wrap=True)
    if document["machine"] is None:
        raise EngineError("the device did not answer")


def _finish(document: dict[str, Any], name: str, line: str, runs_dir: Path, as_json: bool) -> None:
    """Write a benchmark's document and show its line."""
    from autotune.io.files import write_json
    from autotune.records.run_directory import benchmark_folder, describe_environment

    folder = benchmark_folder(Path(runs_dir))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {**document, "environment": describe_environment()}
    write_json(path, document)
    if as_json:
        shared.print_json(document)
    shared.console(as_json=as_json).print(f"{line}; written to {path}", soft_wrap=True)
