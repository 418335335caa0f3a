"""What a recording tells: who waited for what, where two runs first differ, the time machine."""
