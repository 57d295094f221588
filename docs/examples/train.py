"""Train from Python, on rows of one's own and with a workflow of one's own. Arguments are overrides: ``run.steps=20``."""

import sys

from areal_mega import Trainer, load_recipe

rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": str(a + b)} for a in range(50) for b in range(50)]
recipe = load_recipe("recipes/quickstart.yaml", ["run.name=second-try", *sys.argv[1:]])
with Trainer(recipe, train_dataset=rows[::2], valid_dataset=rows[1:400:2]) as trainer:
    result = trainer.train(workflow="my_module.SecondTry", workflow_kwargs={"hint": "?"})
print(f"{result.first_eval:.2f} before, {result.last_eval:.2f} after; the model is in {result.export}")
