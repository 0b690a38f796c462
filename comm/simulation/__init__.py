"""The time that a call over ranks takes, worked out event by event on links that ranks share, without running it."""
