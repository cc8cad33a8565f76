"""How a model is named on the command line. It imports nothing, so that help texts need no PyTorch."""

FORMS = (
    "a preset, SPEC.json, SPEC.yaml, a Hugging Face config.json, a checkpoint folder, a run folder, "
    "package.module:name or file.py:name"
)
INPUT = "A text, a text file, an image file, token ids (5,12,7), random:64, or an array (.npy)."
