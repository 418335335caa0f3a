"""The lab: predicts a schedule, attaches instruments to a run, and draws both."""
