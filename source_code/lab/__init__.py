# SPDX-License-Identifier: Apache-2.0
"""The lab: predicts a schedule, attaches instruments to a run, and draws both."""
