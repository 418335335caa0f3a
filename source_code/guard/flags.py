# SPDX-License-Identifier: Apache-2.0
"""Rejects flags that another flag of the same command leaves unread."""


def check_alone(parser, arguments, flag, others=None):
    """Reject what is given beside `--flag`, which leaves it unread: of the `others`, or of all."""
    for each in parser._actions if getattr(arguments, flag) else []:
        if each.dest == flag or (others is not None and each.dest not in others):
            continue
        if getattr(arguments, each.dest, each.default) != each.default:
            name = (*each.option_strings, each.metavar)[0]
            raise SystemExit(f"--{flag} takes no notice of {name}; leave one of them out")
