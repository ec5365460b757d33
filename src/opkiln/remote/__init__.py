"""Remote tiers: places on other hosts that have compiled ops, asked before anything is compiled."""
