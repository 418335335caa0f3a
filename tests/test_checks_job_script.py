"""What is said of job scripts for lesson 11, without a cluster."""

import pytest
from further import first_of

from course.checks import build_job
from course.cluster import Answer

RIGHT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=10
srun --distribution=block --kill-on-bad-exit=1 "$PYTHON" "$@"
"""


def answer_to(capsys, text):
    build_job.job_script(text, 0)
    return capsys.readouterr().out.strip()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after"),
    first_of(
        [
            ("", ""),
            ("--ntasks-per-node=2", "--ntasks=4\n#SBATCH --exclusive"),
            ("--ntasks-per-node=2", "--tasks-per-node=2"),
            ("--distribution=block", "--dist=block"),
            ("--time=10", "--time=00:10:00"),
            ("--time=10", "-t 5:30"),
            ("--nodes=2", "-N 2  # two of them"),
            (
                "#SBATCH --time=10",
                "#SBATCH --time=10\n#SBATCH --distribution=block:block\n# a word",
            ),
            ("srun ", "export OMP_NUM_THREADS=1\nexec srun "),
            ('"$PYTHON" "$@"', '"$PYTHON" "$@" || exit $?\necho done'),
            ("--kill-on-bad-exit=1", "--kill-on-bad-exit"),
            ("--kill-on-bad-exit=1", "-K1"),
            ("--time=10", "--time=0-00:30"),
            ("srun --distribution=block", "export SLURM_DISTRIBUTION=block\nsrun"),
            (
                "srun --distribution=block --kill-on-bad-exit=1",
                "SLURM_KILL_BAD_EXIT=1 srun -m block",
            ),
            (
                "srun ",
                'set -euo pipefail\ncd "$SLURM_SUBMIT_DIR"\necho "$SLURM_JOB_NAME"\n'
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | head -1)\nsrun ',
            ),
            ("srun ", "set -e\nsrun hostname\nsrun "),
            ('"$PYTHON" "$@"', 'bash -c \'RANK=$SLURM_PROCID exec "$PYTHON" "$@"\' rank "$@"'),
            ("srun ", "srun --nodes=2 -n 4 "),
            ("--distribution=block", "--distribution=plane=2"),
            ("--nodes=2", "--nodes=2-2"),
        ],
        8,
    ),
)
def test_job_scripts_that_do_it(capsys, before, after):
    answer = answer_to(capsys, RIGHT.replace(before, after, 1))
    assert answer.startswith("Right: four ranks start on two nodes"), answer


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    first_of(
        [
            ("#!/bin/bash\n", "", "its first line names a shell"),
            ("#SBATCH --nodes", "# SBATCH --nodes", "line 2, '# SBATCH --nodes=2', is a comment"),
            ("#SBATCH --time", "cd build\n#SBATCH --time", "line 5 comes after it"),
            ("#SBATCH --nodes=2\n", "", "asks for no number of nodes; the ranks are to be on 2"),
            ("--nodes=2", "--nodes=4", "asks for --nodes=4"),
            ("--ntasks-per-node=2", "--ntasks-per-node=4", "ask for 2 tasks per node"),
            ("--ntasks-per-node=2", "--ntasks=4", "SLURM may put 3 on the first"),
            ("#SBATCH --time=10\n", "", "names no time limit"),
            ("--time=10", "--time=12:00:00", "may hold its nodes for 720 minutes"),
            (
                'srun --distribution=block --kill-on-bad-exit=1 "$PYTHON" "$@"',
                "true",
                "calls no srun",
            ),
            ('"$@"', "source_code/gpipe.py", 'pass them on with "$@"'),
            ('"$@"', "source_code/gpipe.py --steps 2", 'pass them on with "$@"'),
            ('"$@"', '"$1" "$@"', 'pass them on with "$@"'),
            ('"$@"', "$@", "one_f_one_b.py --data my text`; pass them on"),
            ('"$PYTHON" "$@"', '"$@"', 'srun is to start "$PYTHON"'),
            ("--distribution=block ", "", "every message of the pipeline crosses the network"),
            ("--distribution=block", "--distribution=cyclic", "--distribution=cyclic can number"),
            ("--kill-on-bad-exit=1 ", "", "the others wait for it until the limit"),
            (
                "--kill-on-bad-exit=1",
                "--kill-on-bad-exit=0",
                "the others wait for it until the limit",
            ),
            ('"$@"\n', '"$@"\necho done\n', "srun ended with status 3, and your script with 0"),
            ('"$@"\n', '"$@" &\nwait -n\nsrun -m block -K1 "$PYTHON" "$@"\n', "srun 2 times"),
            ('"$PYTHON"', '"$PYTHON" -m torch.distributed.run', "leave out torchrun"),
            ('"$PYTHON"', "torchrun --nproc-per-node 2", "leave out torchrun"),
            ("--time=10", "--time=1-0", "may hold its nodes for 1440 minutes"),
            ("--time=10", "--time=0", "names no time limit, or none that SLURM reads"),
            ("srun ", "set -e\nls nowhere\nsrun ", "your script ends before it calls srun, with"),
            ("--distribution=block", "--distribution=plane=1", "--distribution=plane=1 can number"),
            ('"$PYTHON" "$@"', 'bash -c \'"$@"\' rank "$@"', 'srun is to start "$PYTHON"'),
            ("srun ", "srun -n 2 ", "srun takes --ntasks=2, and 4 ranks are to be on 2 nodes"),
            ("--kill-on-bad-exit=1", "--kill-on-bad-exit 1", "srun takes 1 for the program"),
        ],
        8,
    ),
)
def test_job_scripts_that_do_not(capsys, before, after, sentence):
    assert before in RIGHT
    answer = answer_to(capsys, RIGHT.replace(before, after, 1))
    assert answer.startswith("Not yet: ") and sentence in answer, answer


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ('bash -c \'exec "${PYTHON}" "$@"\' rank "$@"', "Right: "),
        ('python3 "$@"', "any other Python may lack torch"),
        ('"$PYTHON" source_code/gpipe.py "$@"', "names source_code/gpipe.py itself"),
    ],
)
def test_srun_starts_the_python_with_torch_and_the_given_program(capsys, command, sentence):
    answer = answer_to(capsys, RIGHT.replace('"$PYTHON" "$@"', command))
    assert sentence in answer, answer


@pytest.mark.processes
def test_a_flag_that_only_the_command_gets_is_not_one_of_srun(capsys):
    command = 'srun -m block bash -c \'exec "$PYTHON" "$@"\' -K1 "$@"'
    answer = answer_to(capsys, RIGHT[: RIGHT.index("srun")] + command)
    assert "the others wait for it until the limit" in answer, answer


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["/bin/bash -e", "/bin/bash -eu", "/usr/bin/env -S bash -e"])
def test_a_shell_that_ends_at_an_error_may_be_named_in_the_first_line(capsys, shell):
    """SLURM starts a script by its first line, so the echo comes only after a good end."""
    answer = answer_to(capsys, RIGHT.replace("/bin/bash", shell) + "echo done\n")
    assert answer.startswith("Right: "), answer


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("exit 1", "srun ended with status 0, and your script with 1"),
        ("code=$?\n[ $code -ne 0 ] && exit $code", "SLURM would call a job FAILED"),
        ("code=$?\nif [ $code -ne 0 ]; then exit $code; fi\necho done", "Right: "),
        ("code=$?\n[ $code -eq 0 ] || exit $code\nseff $SLURM_JOB_ID", "Right: "),
    ],
)
def test_a_job_whose_ranks_end_well_ends_well(capsys, end, sentence):
    answer = answer_to(capsys, f"{RIGHT}{end}\n")
    assert sentence in answer, answer


@pytest.mark.processes
def test_losses_may_be_searched_in_the_output(capsys):
    answer = answer_to(
        capsys, RIGHT.replace('"$@"', '"$@" | grep loss').replace("srun", "set -o pipefail\nsrun")
    )
    assert answer.startswith("Right: "), answer


@pytest.mark.processes
@pytest.mark.parametrize("call", ["sleep 9; srun", "until srun"])
def test_a_script_without_an_end_is_told_so(capsys, monkeypatch, call):
    """It may wait before it starts a rank, or start them again for ever."""
    monkeypatch.setattr(build_job, "SECONDS", 0.5)
    again = "; do sleep 1; done" if call == "until srun" else ""
    answer = answer_to(capsys, RIGHT.replace("srun", call).rstrip() + again)
    assert "takes longer than 0.5 s, although srun ends at once here" in answer


@pytest.mark.processes
@pytest.mark.parametrize("where", ["", " >&2"])
def test_a_script_that_prints_without_end_is_told_so_and_fills_no_disk(capsys, where):
    answer = answer_to(capsys, RIGHT.replace("srun", f"yes{where}\nsrun"))
    assert f"prints {build_job.MOST_PRINTED:,} bytes and more" in answer


def test_a_script_is_a_text_and_a_stub_is_not_attempted(capsys):
    assert "give the script as a text" in answer_to(capsys, 3)
    assert answer_to(capsys, ...).startswith("Not attempted yet")


class Queue:
    """A cluster that answers with what a test says."""

    is_real = True

    def __init__(self, output, state="COMPLETED"):
        self.answer = Answer(output, state)

    def submit(self, name, words, may_fail, show):
        assert words.endswith("build/11_my_job.sbatch source_code/gpipe.py --steps 2")
        return self.answer


RAN = "gpipe: 4 ranks on cpu of nodes a a b b, gloo messages\nstep 0  loss 5.929890\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("output", "state", "sentence"),
    [
        (f"{RAN}step 1  loss 5.242678\n", "COMPLETED", "Right: "),
        (f"{RAN}step 1  loss 5.242679\n", "COMPLETED", "those of lesson 02 are"),
        ("python: no such file", "FAILED", "ended as FAILED; its last line: python: no such file"),
        (RAN.replace("a a b b", "a b a b"), "COMPLETED", "the ranks were on a, b, a, b, not two"),
        ("gpipe: 1 rank on cpu", "COMPLETED", "the ranks were on one node"),
    ],
)
def test_what_a_cluster_says_is_told(capsys, output, state, sentence):
    build_job.job_script(RIGHT, Queue(output, state))
    assert sentence in capsys.readouterr().out
