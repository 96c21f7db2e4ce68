"""How any study is found, configured, run, stored, resumed, shared out over devices, and judged."""
