"""Networks by name: ``(input_shape, classes, ...)`` in, a body and a head out.

See ``contract`` for what a method may ask of one. None has running statistics unless asked for;
only ``simple_cnn`` draws random numbers (dropout).
"""
