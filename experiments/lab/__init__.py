"""How any study is run, stored, resumed, shared out and judged."""
