"""The lab looks on: it predicts a schedule, attaches instruments to a run, and draws both."""
