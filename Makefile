PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: train test test-fast lint docs clean

# Trains the embedded model with ERPO: a model folder, logs and a figure under runs/tiny.
train: $(VENV)/installed
	$(RUN)/accelerate launch recipes/train_math.py --config recipes/configs/tiny.yaml

test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2

test-fast: $(VENV)/installed
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/installed
	$(RUN)/ruff check . && $(RUN)/ruff format --check .

MODULES := erpo_trl erpo_trl.evaluation erpo_trl.tiny '!erpo_trl.tiny.build' $(filter-out erpo_trl._% \
	erpo_trl.evaluation._%,$(subst /,.,$(basename $(wildcard erpo_trl/*.py erpo_trl/evaluation/*.py))))

# The API reference, under docs/api.
docs: $(VENV)/installed
	$(RUN)/python -W error::UserWarning -m pdoc -d google -o docs/api $(MODULES)

$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet -c constraints.txt -e ".[test,plot,dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
