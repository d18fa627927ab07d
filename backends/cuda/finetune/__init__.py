"""LoRA finetuning of a Hugging Face model as small units that can stop between any two.

`work.FinetuneWork` is what a serving loop sees of it and imports nothing heavy; `engine.FinetuneEngine` is the
implementation over torch and PEFT. The job file (`job_file`) is the only module that needs pydantic.
"""
