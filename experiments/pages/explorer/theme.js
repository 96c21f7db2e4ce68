const dark = matchMedia("(prefers-color-scheme: dark)")
const paint = () => {
  const colors = dark.matches
    ? {ink: "#e6e9ee", line: "#3a4452"} : {ink: "#1d2430", line: "#d9dde3"}
  for (const [model, property, kind] of painted) model[property] = colors[kind]
}
dark.addEventListener("change", paint)
paint()
