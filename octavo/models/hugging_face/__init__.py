"""Any causal language model of transformers, with its attention replaced: the model `transformers`."""
