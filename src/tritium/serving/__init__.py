"""Which model answers, in which version, and when: repositories, configurations, states, counters."""
