"""What PyTorch's allocator counts while a real model trains on the CPU, independently of the prediction.

The profiler reports every allocation and release by the CPU allocator, including temporaries inside kernels.
"""

import dataclasses

import torch
import torch.nn.functional as F

import regard as rg
from regard.engine import call as engine_call
from regard.engine.backends import PREPARED
from regard.engine.cpu import gathered_layout, kernels, strided_layout
from regard.nn import cached_rotation
from regard.position import learned
from regard.spec import catalogue

N, PIXELS = 61, (48, 48)


def small(name, layers=2):
    """The model of this name, a few layers of width 64."""
    if name == "transformer-base":
        return catalogue.transformer(64, 4, 256, layers, vocab=500)
    declared = rg.preset(name)
    inner = declared.encoder if isinstance(declared, rg.Vision) else declared
    block = dataclasses.replace(
        inner.block,
        attention=dataclasses.replace(inner.block.attention, d_model=64, heads=4),
        feed_forward=dataclasses.replace(inner.block.feed_forward, d_ff=256),
    )
    changes = {"block": block, "layers": layers}
    if inner.embedding is not None:
        changes["embedding"] = dataclasses.replace(
            inner.embedding, vocab=500, d_model=64, position=learned(128)
        )
    inner = dataclasses.replace(inner, **changes)
    if not isinstance(declared, rg.Vision):
        return inner
    head = rg.ClassifierHead(10, pool="first")
    return dataclasses.replace(declared, encoder=inner, image=PIXELS, patch=(8, 8), head=head)


def length(declared):
    return declared.tokens if isinstance(declared, rg.Vision) else N


def checkpointed(declared):
    """The same model, each block recomputed in the backward pass."""
    match declared:
        case rg.EncoderDecoder(encoder, decoder):
            return dataclasses.replace(
                declared,
                encoder=dataclasses.replace(encoder, checkpoint=True),
                decoder=dataclasses.replace(decoder, checkpoint=True),
            )
        case rg.Vision(encoder):
            return dataclasses.replace(declared, encoder=dataclasses.replace(encoder, checkpoint=True))
    return dataclasses.replace(declared, checkpoint=True)


def inputs(declared, b):
    def ids(embedding):
        return torch.randint(0, embedding.vocab, (b, N))

    match declared:
        case rg.EncoderDecoder(encoder, decoder):
            return [ids(encoder.embedding), ids(decoder.embedding)]
        case rg.Vision():
            return [torch.randn(b, declared.channels, *declared.image)]
    return [ids(declared.embedding)]


def targets(declared, b):
    inner = declared.decoder if isinstance(declared, rg.EncoderDecoder) else declared
    match inner.head:
        case rg.ClassifierHead(classes):
            return torch.randint(0, classes, (b,))
        case rg.LanguageHead() | rg.MaskedHead():
            return torch.randint(0, inner.embedding.vocab, (b * N,))
    return None


class Trained:
    """A real model with its optimizer, after one step."""

    def __init__(self, declared, b, low=None, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model, self.low = declared.build(), low
        self.given, self.targets = inputs(declared, b), targets(declared, b)
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.step()

    def loss(self):
        with torch.autocast("cpu", dtype=self.low or torch.bfloat16, enabled=self.low is not None):
            out = self.model(*self.given)
            if self.targets is None:
                return out.square().mean()
            return F.cross_entropy(out.flatten(0, -2), self.targets)

    def step(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def allocated(self):
        """Bytes of weights, optimizer state and inputs, which exist before a step begins."""
        states = [x for s in self.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
        states = [x for x in states if x.dim()]  # not the number of steps
        given = [*self.given, *([] if self.targets is None else [self.targets])]
        return sum(x.numel() * x.element_size() for x in [*self.model.parameters(), *states, *given])


def emptied():
    """Without the tables and buffers that the engine keeps of earlier calls."""
    PREPARED.clear()
    kernels._pool.clear()
    for module in (engine_call, gathered_layout, strided_layout, cached_rotation):
        for made in vars(module).values():
            if hasattr(made, "cache_clear"):
                made.cache_clear()


def counted(call, first=lambda: None):
    """(peak, at the end) while `call` ran, in bytes that the allocator added since before `first` ran."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        first()
        with torch.profiler.record_function("call"):
            result = call()
    events = profile.profiler.kineto_results.events()
    begin = next(e.start_ns() for e in events if e.name() == "call")
    now = peak = 0
    for at, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        peak = max(peak, now) if at >= begin else now
    del result
    return peak, now


def later_peak(call):
    """Peak of the second of two calls, in bytes that the allocator added since before the first.

    The tables and buffers that the engine keeps from call to call count, as in a prediction. An earlier call would
    hide them, as the allocator counts memory only when it is taken: so the engine begins without them.
    """
    emptied()
    return counted(call, call)[0]


def saved(call):
    """The storages that autograd saves while `call` runs, by address, each once."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    del out
    return storages
