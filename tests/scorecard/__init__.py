"""The scorecard: what fedstill promises, measured on the machine where it runs."""
