# SPDX-License-Identifier: Apache-2.0
"""Rejects flags that a program would ignore because of another flag, or for lack of one."""


def check_alone(parser, arguments, flag, others=None):
    """Reject a flag that `--flag` makes the program ignore: one of `others`, or any other flag."""
    for each in parser._actions if getattr(arguments, flag) else []:
        if each.dest == flag or (others is not None and each.dest not in others):
            continue
        if getattr(arguments, each.dest, each.default) != each.default:
            name = (*each.option_strings, each.metavar)[0]
            raise SystemExit(f"--{flag} ignores {name}; leave one of them out")


def check_read(parser, arguments, flag, is_read, needs):
    """Reject a flag that the program does not read, because it lacks what the flag `needs`."""
    name = flag.removeprefix("--").replace("-", "_")
    if not is_read and getattr(arguments, name) != parser.get_default(name):
        raise SystemExit(f"{flag} has no effect without {needs}; add that, or leave {flag} out")
