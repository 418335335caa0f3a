"""Analysis of recordings: what ranks waited for, where two runs first differ, the time machine."""
