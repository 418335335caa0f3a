# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 11's job script: with a stand-in for srun, and on a cluster as a real job."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from course.checks.answer import WrongAnswer, checked
from course.launch import ROOT

NODES, RANKS = 2, 4
PROGRAM = ["source_code/gpipe.py", "--steps", "2"]
TRIED = ["source_code/one_f_one_b.py", "--data", "my text"]  # with the stand-in for srun
LOSSES = [5.929890, 5.242678]  # those of lesson 02, whose model the job trains
MOST_PRINTED = 2**24  # bytes of its output, of its errors, or of another file that it writes
SECONDS = 20  # limit for a script; the srun that it calls here ends at once
LONGEST = 30  # minutes that a job of two steps may ask for
FAILED = 3  # the status of the srun that stands in for a rank that fails
SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "m": "distribution"}
ALSO = {"tasks-per-node": "ntasks-per-node", "dist": "distribution"}  # SLURM takes these, too
NO_COMMAND = 127  # a shell's status for a command that this machine lacks, such as SLURM's seff
# Stands in for srun: writes its arguments to a file, one per line, and ends as the ranks would, all
# well or one failed. The first lines are the options that srun takes from the environment. A call
# without the program, such as `srun hostname`, succeeds.
STAND_IN = f"""#!/bin/sh
case "$*" in
    *{TRIED[0]}*) status=$SRUN_STATUS; echo >> "$SRUN_WORDS.calls" ;;
    *) status=0; [ -e "$SRUN_WORDS" ] && exit ;;
esac
printf '%s\\n' ${{SLURM_DISTRIBUTION:+"--distribution=$SLURM_DISTRIBUTION"}} \\
    ${{SLURM_KILL_BAD_EXIT:+"--kill-on-bad-exit=$SLURM_KILL_BAD_EXIT"}} "$@" > "$SRUN_WORDS"
[ "$status" != 0 ] || echo "step 0  loss {LOSSES[0]:.6f}"
exit "$status"
"""
# Stands in for scontrol, with which a script finds the names of its nodes.
HOST_NAMES = "#!/bin/sh\nprintf 'node%s\\n' 1 2\n"
# Variables that the job around the notebook may have set.
FROM_OUTSIDE = ("SLURM_DISTRIBUTION", "SLURM_KILL_BAD_EXIT")


@checked(
    "four ranks start on two nodes, neighbours side by side, and a rank that fails fails the job."
)
def job_script(job, cluster):
    """Check `job`, the text of a job script; its arguments are the command that the ranks run.

    The script runs once with a stand-in for srun that only records its arguments. On a real
    `cluster` (course/cluster.py) it is also submitted as a job.
    """
    if not isinstance(job, str):
        raise WrongAnswer("give the script as a text, in three quotes")
    text = job.strip() + "\n"
    complaint = (
        _complaint_on_options(text) or _complaint_on_call(text) or _complaint_on_good_end(text)
    )
    if complaint or not (cluster and cluster.is_real):
        return complaint
    return _complaint_on_job(text, cluster)


def options_of(text):
    """{long name: value} of the options that SLURM reads: up to the first command."""
    options = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            options |= _options_in(line.removeprefix("#SBATCH").split("#")[0].split())
    return options


def _options_in(words):
    """{long name: value} of the options in a list of words, such as ["--nodes=2", "-t", "10"]."""
    options = {}
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--"):
            options[ALSO.get(name, name)] = value if equals else following
        elif word.startswith("-") and name[:1] in SHORT:
            options[SHORT[name[0]]] = name[1:] or following
    least, _, most = options.get("nodes", "").partition("-")
    return options | ({"nodes": least} if least and least == most else {})


def _complaint_on_options(text):
    lines, options = text.splitlines(), options_of(text)
    if not lines[0].startswith("#!"):
        return "sbatch takes a script only if its first line names a shell, as in #!/bin/bash"
    for number, line in enumerate(lines, 1):
        if re.match(r"#\s+SBATCH\b|##+\s*SBATCH\b", line):
            return f"line {number}, '{line}', is a comment to SLURM: an option begins with #SBATCH"
    commands = [number for number, line in enumerate(lines) if line.strip() and line[0] != "#"]
    for number, line in enumerate(lines):
        if line.startswith("#SBATCH") and commands and number > commands[0]:
            return f"SLURM reads options up to the first command; line {number + 1} comes after it"
    if options.get("nodes") != str(NODES):
        asked = f"--nodes={options['nodes']}" if "nodes" in options else "no number of nodes"
        return f"your script asks for {asked}; the ranks are to be on {NODES}"
    per_node, total = options.get("ntasks-per-node"), options.get("ntasks")
    # A job that has its nodes alone takes all their cores, and SLURM then puts two tasks on each.
    alone = options.get("exclusive") not in (None, "user", "mcs", "topo")
    if per_node is None and total == str(RANKS) and not alone:
        return (
            f"of {RANKS} tasks on {NODES} nodes, SLURM may put {RANKS - 1} on the first: ask for "
            f"{RANKS // NODES} tasks per node"
        )
    if per_node != str(RANKS // NODES) and (per_node or total != str(RANKS)):
        return f"srun starts a process for each task: ask for {RANKS // NODES} tasks per node"
    minutes = _minutes(options.get("time", ""))
    if not minutes:  # SLURM takes 0 for no limit
        return "your script names no time limit, or none that SLURM reads: a job that hangs costs all of it"
    if minutes > LONGEST:
        return f"two steps take seconds, and your job may hold its nodes for {minutes:g} minutes"
    return None


def _minutes(limit):
    """A limit of SLURM in minutes, or None. Its forms are MINUTES[:SECONDS],
    HOURS:MINUTES:SECONDS and DAYS-HOURS[:MINUTES[:SECONDS]]."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d?){0,2}", limit):
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 60 * (24 * int(days or 0) + hours) + minutes + seconds / 60


def _run_with_stand_in(text, srun_status):
    """Run the script with a stand-in for srun that ends with `srun_status`.

    Returns its exit status, the last line of its errors, the arguments of its last srun or None,
    and how many times it called srun for the program.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "srun").write_text(STAND_IN, encoding="utf-8")
        (folder / "srun").chmod(0o755)
        (folder / "scontrol").write_text(HOST_NAMES, encoding="utf-8")
        (folder / "scontrol").chmod(0o755)
        (folder / "job.sbatch").write_text(text, encoding="utf-8")
        words, calls = folder / "words", folder / "words.calls"
        environment = {
            **{name: value for name, value in os.environ.items() if name not in FROM_OUTSIDE},
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "SRUN_WORDS": str(words),
            "SRUN_STATUS": str(srun_status),
            **_variables_of_job(text),
        }
        # Bash takes flags from the first line only if it is started by it, and that may be a login.
        strict = "-e" if re.match(r"#!.*\s-[a-z]*e", text) else "+e"
        status, errors = _run(["bash", strict, str(folder / "job.sbatch"), *TRIED], environment)
        called = words.read_text(encoding="utf-8").splitlines() if words.exists() else None
        started = len(calls.read_text(encoding="utf-8")) if calls.exists() else 0
    last = (errors.strip().splitlines() or [""])[-1].rpartition(f"{folder}/")[2]
    return status, last, called, started


def _complaint_on_call(text):
    """The error in what the script tells srun, or in the script's status if srun fails, or None."""
    status, last, called, started = _run_with_stand_in(text, FAILED)
    if called is None:
        if status and re.search(r"^[^#\n]*\bsrun\b", text, re.MULTILINE):
            return f"your script ends before it calls srun, with status {status}" + (
                f" ({last})" if last else ""
            )
        return "your script calls no srun, so its program runs once, on the first node only" + (
            f" ({last})" if last else ""
        )
    if called[-len(TRIED) :] != TRIED or called.count(TRIED[0]) > 1:
        return (
            f"the ranks were to run `{shlex.join(TRIED)}`, the words after the script's name, and "
            f'srun was told `... {shlex.join(called[-4:])}`; pass them on with "$@"'
        )
    words = called[: -len(TRIED)]
    if re.search(r"torchrun|torch\.distributed\.(run|launch)", " ".join(words)):
        return "srun starts every rank here: leave out torchrun, which starts ranks of its own"
    starts = [sys.executable in word or re.search(r"\$\{?PYTHON\b", word) for word in words]
    if not any(starts):
        return (
            'srun is to start "$PYTHON" with these words: a .py file is not a program by itself, and '
            "any other Python may lack torch"
        )
    at = next(place for place, found in enumerate(starts) if found)  # srun's words come before it
    if named := [word for word in words[at + 1 :] if word.endswith(".py")]:
        return (
            f"your script names {named[0]} itself, so that program runs and the given one is only its "
            f'argument: leave {named[0]} out, "$@" begins with the program'
        )
    own = options_of(text) | _options_in(called[:at])
    if complaint := _complaint_on_sizes(called, own):
        return complaint
    if started > 1:
        return (
            f"your script calls srun {started} times for the program: each call starts {RANKS} ranks, "
            f"so that is {started} trainings; one call starts the ranks of all nodes"
        )
    if not own.get("distribution", "block").startswith(("block", f"plane={RANKS // NODES}")):
        return (
            f"--distribution={own['distribution']} can number the ranks so that every message of the "
            "pipeline crosses the network; use block"
        )
    if "distribution" not in own:
        return (
            "nothing says how ranks are numbered: where SLURM's default is cyclic, every message "
            "of the pipeline crosses the network"
        )
    if not {"-K", "-K1", "--kill-on-bad-exit", "--kill-on-bad-exit=1"} & set(called[:at]):
        return "one rank fails, and the others wait for it until the limit: srun has an option for that"
    if status == 0:
        return (
            f"srun ended with status {FAILED}, and your script with 0: SLURM would call the job "
            "COMPLETED. The status of a script is that of its last command"
        )
    return None


def _complaint_on_good_end(text):
    status = _run_with_stand_in(text, 0)[0]
    if status not in (0, NO_COMMAND):
        return (
            f"srun ended with status 0, and your script with {status}: SLURM would call a job FAILED "
            "whose ranks have all ended well. The status of a script is that of its last command"
        )
    return None


def _variables_of_job(text):
    """{name: value} of the variables that SLURM sets in a job with the options of this script."""
    options = options_of(text)
    names = {"NTASKS_PER_NODE": "ntasks-per-node", "CPUS_PER_TASK": "cpus-per-task"}
    set_by_options = {name: options[option] for name, option in names.items() if option in options}
    variables = {
        **{"JOB_ID": "4711", "JOBID": "4711", "JOB_NAME": options.get("job-name", "job.sbatch")},
        **{"NNODES": NODES, "JOB_NUM_NODES": NODES, "NTASKS": RANKS, "NPROCS": RANKS},
        **{"JOB_NODELIST": "node[1-2]", "NODELIST": "node[1-2]", "SUBMIT_DIR": ROOT},
        **{"PROCID": 0, "NODEID": 0, "LOCALID": 0, "CPUS_ON_NODE": RANKS // NODES},
        **set_by_options,
    }
    return {f"SLURM_{name}": str(value) for name, value in variables.items()}


def _complaint_on_sizes(called, own):
    """The error in the numbers that srun is told, or None."""
    for name, wanted in (("nodes", NODES), ("ntasks", RANKS), ("ntasks-per-node", RANKS // NODES)):
        if own.get(name, str(wanted)) != str(wanted):
            return f"srun takes --{name}={own[name]}, and {RANKS} ranks are to be on {NODES} nodes"
    for word, following in zip(called, called[1:]):
        if word in ("-K", "--kill-on-bad-exit") and following in ("0", "1"):
            return (
                f"after {word} and a space, srun takes {following} for the program that it starts; "
                "write --kill-on-bad-exit=1"
            )
    return None


def _run(words, environment):
    """(exit status, errors) of a script, none of whose files may become longer than MOST_PRINTED."""
    words = ["bash", "-c", f'ulimit -c 0 -f {MOST_PRINTED // 1024} && exec "$0" "$@"', *words]
    # Not pipes, from which Python would read gigabytes into its memory.
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        try:
            ended = subprocess.run(
                words, cwd=ROOT, env=environment, stdout=printed, stderr=errors, timeout=SECONDS,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise WrongAnswer(
                f"your script takes longer than {SECONDS} s, although srun ends at once here: what does "
                "it wait for?"
            ) from None
        if max(file.seek(0, os.SEEK_END) for file in (printed, errors)) >= MOST_PRINTED:
            raise WrongAnswer(
                f"your script prints {MOST_PRINTED:,} bytes and more; does something in it print without end?"
            )
        errors.seek(0)
        return ended.returncode, errors.read().decode(errors="replace")


def _complaint_on_job(text, cluster):
    file = ROOT / "build" / "11_my_job.sbatch"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    words = f"--export=ALL,PYTHON={sys.executable} {file.relative_to(ROOT)} {' '.join(PROGRAM)}"
    with contextlib.redirect_stdout(io.StringIO()):
        answer = cluster.submit("", words, may_fail=True, show=False)
    lines = [line for line in answer.output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))] or lines
    if answer.state != "COMPLETED":
        return f"the job ended as {answer.state}; its last line: {lines[-1] if lines else 'none'}"
    nodes = re.search(r"of nodes (.*), ", answer.output)
    names = nodes[1].split() if nodes else []
    if len(names) != RANKS or names != sorted(names) or len(set(names)) != NODES:
        return f"the ranks were on {', '.join(names) or 'one node'}, not two on each of two nodes"
    if [round(loss, 6) for loss in answer.losses] != LOSSES:
        return f"the losses were {answer.losses}, and those of lesson 02 are {LOSSES}"
    return None
