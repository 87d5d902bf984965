"""Networks by name. A constructor takes ``(input_shape, classes, ...)`` and returns a network with
a body and a head.

``contract`` lists what a method may require of a network. By default, no network has running
statistics, and only ``simple_cnn`` draws random numbers (dropout).
"""
