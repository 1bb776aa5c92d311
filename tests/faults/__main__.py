"""`python tests/faults`: every fault, or a seeded sample of them, and a table of what was clean."""

import argparse
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from harness import Harness, Verdict  # noqa: E402
from inputs import build  # noqa: E402
from kinds import all_faults  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402, F401

from neuronmm_ops.cli import main  # noqa: E402


def run() -> int:
    """Run them; exit with 1 where less than 99 % are clean, or one is silent or hangs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="how many, drawn at random (default all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="faults whose `kind: name` matches"
    )
    parser.add_argument("--also", metavar="REGEX", help="faults besides the sample")
    parser.add_argument("--show", action="store_true", help="print what each command prints")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        build(Path(place))
        named = {f"{fault.kind}: {fault.name}": fault for fault in all_faults(Path(place))}
        names = [name for name in named if re.search(options.only, name)]
        if options.sample is not None:
            names = random.Random(options.seed).sample(names, options.sample)  # noqa: S311
        if options.also is not None:
            names += [name for name in named if re.search(options.also, name)]
        faults = [named[name] for name in dict.fromkeys(names)]
        harness, verdicts = Harness(Path(place), main), []
        for fault in faults:
            verdicts.append(harness.run(fault))
            if options.show or verdicts[-1].problems:
                _tell(verdicts[-1])
    return _judge(verdicts)


def _tell(verdict: Verdict) -> None:
    fault = verdict.fault
    print(f"{fault.kind}: {fault.name}: {'; '.join(verdict.problems) or 'clean'}")
    print(f"    {fault.command:.300}\n    exit {verdict.code}, {verdict.seconds:.1f} s")
    for line in [*verdict.out.splitlines()[-1:], *verdict.err.splitlines()[-6:]]:
        print(f"    | {line!a:.400}")
    sys.stdout.flush()


def _judge(verdicts: list[Verdict]) -> int:
    tried = Counter(verdict.fault.kind for verdict in verdicts)
    clean = Counter(verdict.fault.kind for verdict in verdicts if not verdict.problems)
    for kind, count in tried.items():
        print(f"{kind:32} {clean[kind]:4} of {count:4}")
    print(f"{'all':32} {clean.total():4} of {tried.total():4}")
    lost = ("silent", "hangs", "changed", "ended by")
    worst = [v for v in verdicts if any(problem.startswith(lost) for problem in v.problems)]
    print(f"{len(worst)} silent, hanging, or with data lost")
    return int(bool(worst) or clean.total() < 0.99 * tried.total())


sys.exit(run())
