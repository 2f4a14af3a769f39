"""What tests are made of: tiny models, a scripted model, fakes. For our tests and for plugin authors'."""
