# SPDX-License-Identifier: Apache-2.0
"""What is wrong on purpose: the code behind the scripts whose names begin with broken_."""
