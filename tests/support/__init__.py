"""What tests share: the tolerance rule, the fp64 oracle, plain PyTorch, cases, checks; no test is here."""
