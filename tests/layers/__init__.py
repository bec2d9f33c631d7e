"""The layers as operators and as modules: multi-head, GPT, grouped-query, latent, Longformer; positions; accounting."""
