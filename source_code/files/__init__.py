# SPDX-License-Identifier: Apache-2.0
"""Files and pickles are read without harm, and written whole or not at all."""
