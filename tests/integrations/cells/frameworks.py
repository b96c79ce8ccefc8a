"""Cells of test_frameworks.py: each framework as its own documentation writes it."""

# %% what all train
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbdist import Session, in_ddp

rows = TensorDataset(torch.randn(16, 2))

# %% Lightning
import lightning

quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, number):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def with_trainer(**options):
    model = Model()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet, **options)
    trainer.fit(model, DataLoader(rows, batch_size=2))
    return trainer.world_size, trainer.global_rank, trainer.global_step, model.layer.weight.sum().item()


def with_fabric(**options):
    fabric = lightning.Fabric(accelerator="cpu", **options)
    fabric.launch()
    return fabric.world_size, type(fabric.setup(nn.Linear(2, 1))._forward_module).__name__


with Session(2) as session:
    named = [{"strategy": name, "devices": 2} for name in ("ddp", "ddp_notebook", "ddp_spawn")]
    for options in (*named, {"devices": 2}, {"devices": "auto"}, {}):
        first, second = session.run_all(with_trainer, **options)
        assert first[:3] == (2, 0, 4) and second[:3] == (2, 1, 4) and first[3] == second[3], options
        assert session.run_all(with_fabric, **options) == [(2, "DistributedDataParallel")] * 2, options

# %% an Accelerator of an earlier cell
from accelerate import Accelerator, PartialState

accelerator, state = Accelerator(gradient_accumulation_steps=2), PartialState()


# %% accelerate
def with_accelerator():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    steps = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            steps.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    return type(model).__name__, steps, accelerator.is_main_process, state.num_processes


with Session(2) as session:
    for _ in range(2):
        expected = [("DistributedDataParallel", [False, True] * 2, rank == 0, 2) for rank in range(2)]
        assert session.run_all(with_accelerator) == expected
assert accelerator.num_processes == 1

# %% what was prepared in an earlier cell
prepared, optimizer = accelerator.prepare(nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))


def step():
    accelerator.backward(prepared(torch.ones(1, 2)).mean())


in_ddp(1, step)
for fn in (step, lambda: optimizer.step()):
    try:
        in_ddp(2, fn)
    except Exception as error:
        assert "`prepare` inside the function" in str(error), error
    else:
        raise AssertionError("each rank has trained by itself")

# %% TrainingArguments of an earlier cell
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, report_to=[])
arguments.save_strategy, arguments.disable_tqdm = "no", True


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).pow(2).mean()}


trainer = Trainer(Loss(), arguments, train_dataset=[{"x": x, "labels": torch.zeros(1)} for (x,) in rows])


# %% transformers
def with_transformers(trainer):
    steps = trainer.train().global_step
    return trainer.args.world_size, trainer.args.n_gpu, steps, type(trainer.model_wrapped).__name__


def made_there():
    return with_transformers(Trainer(Loss(), arguments, train_dataset=trainer.train_dataset))


with Session(2) as session:
    for fn, args in ((made_there, ()), (with_transformers, (trainer,))):
        assert session.run_all(fn, *args) == [(2, 0, 2, "DistributedDataParallel")] * 2
assert arguments.world_size == 1

# %% transformers as its tutorial of fine-tuning writes it
import os

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film"])}
raw = Tokenizer(WordLevel(words, unk_token="[UNK]"))
raw.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
texts = ["a good film", "bad", "good", "a bad film"] * 8
dataset = [{**tokenizer(text, truncation=True), "label": int("good" in text)} for text in texts]
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def compute_metrics(predictions):
    logits, labels = predictions
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "report_to": "none"}
options |= {"num_train_epochs": 3, "learning_rate": 0.05, "weight_decay": 0.01, "gradient_accumulation_steps": 2}
trainer = Trainer(
    model=BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=2, **sizes)),
    args=TrainingArguments("tuned", per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, **options),
    train_dataset=dataset,
    eval_dataset=dataset,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics,
)


def tuned():
    steps = trainer.train().global_step
    trainer.save_model("best")
    predictions = trainer.predict(dataset).predictions
    return trainer, (steps, trainer.evaluate()["eval_accuracy"], len(predictions), trainer.args.world_size)


back, found = in_ddp(2, tuned)
assert found == (3 * 2, 1.0, 32, 2) and sorted(os.listdir("tuned")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
assert back.args.world_size == 1 and back.evaluate()["eval_accuracy"] == 1.0
assert type(BertForSequenceClassification.from_pretrained("best")) is type(back.model)
assert in_ddp(2, lambda: trainer.train(resume_from_checkpoint=True).global_step) == 6

# %% ignite
import ignite.distributed as idist


def with_ignite():
    seen = []
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(lambda local_rank: seen.append((idist.get_world_size(), local_rank)))
        seen.append(type(idist.auto_model(nn.Linear(2, 1))).__name__)
    return *seen, idist.get_world_size()


with Session(2) as session:
    for _ in range(2):
        assert session.run_all(with_ignite) == [((2, rank), "DistributedDataParallel", 2) for rank in range(2)]
