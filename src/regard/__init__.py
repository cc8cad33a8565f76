"""regard: attention you can declare, run, price, prove, train and see."""

__version__ = "0.1.0"
