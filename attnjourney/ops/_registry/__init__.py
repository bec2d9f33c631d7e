"""How schemas become operators: fakes, autograd nodes, derivatives of any order, vmap, FLOP counts."""
