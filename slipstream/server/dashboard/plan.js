// The plan as a table: decision, value, reason, flag, and vLLM's value where it is another.

function bytes(count) {
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 1024 ** power).toLocaleString("en-GB", { maximumFractionDigits: 1 })} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function text(value) {
  if (typeof value === "boolean") return value ? "on" : "off";
  if (typeof value === "number") return value.toLocaleString("en-GB");
  if (Array.isArray(value)) return value.map(text).join(" ");
  if (value !== null && typeof value === "object") {
    return Object.entries(value)
      .filter(([, part]) => part !== null)
      .map(([name, part]) => `${name.replaceAll("_", " ")} ${name.startsWith("bytes") ? bytes(part) : text(part)}`)
      .join(", ");
  }
  return String(value);
}

function cell(content, tag = "td") {
  const element = document.createElement(tag);
  element.append(content);
  return element;
}

export function showPlan(plan) {
  const vllm = plan.vllm_0_31 || {};
  const rows = Object.entries(plan)
    .filter(([name, choice]) => name !== "vllm_0_31" && choice && typeof choice === "object")
    .map(([name, choice]) => {
      const row = document.createElement("tr");
      const value = cell(text(choice.value));
      const theirs = vllm[name];
      if (theirs && text(theirs.value) !== text(choice.value)) {
        const other = document.createElement("span");
        other.className = "vllm";
        other.textContent = `vLLM 0.31: ${text(theirs.value)}`;
        other.title = theirs.reason;
        value.append(other);
      }
      const flag = document.createElement("code");
      flag.textContent = choice.flag || "";
      row.append(cell(name.replaceAll("_", " ")), value, cell(choice.reason), cell(flag));
      return row;
    });
  document.querySelector("#plan tbody").replaceChildren(...rows);
}
