"""Many prompts in one call: they share batches, and the blocks of their common beginning."""

from octavo import LLM, SamplingParams

INSTRUCTION = "Below is a question and, after it, a short answer of one line, written by a careful teacher.\n\n"
QUESTIONS = ["What is the capital of France?", "How many legs has a spider?", "What is the boiling point of water?"]


def main() -> None:
    prompts = [f"{INSTRUCTION}Question: {question}\nAnswer:" for question in QUESTIONS]
    greedy = SamplingParams(temperature=0, max_tokens=24, stop="\n")
    with LLM(num_kv_blocks=500) as llm:
        for question, output in zip(QUESTIONS, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
            print(f"{question}{output.outputs[0].text}")
        stats = llm.stats()
        print(f"{stats.hit_tokens} of {stats.queried_tokens} prompt tokens came from the prefix cache")


if __name__ == "__main__":
    main()
