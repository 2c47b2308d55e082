"""Which rows make a batch, which are paired, and how ranks share them: functions of numbers only."""
