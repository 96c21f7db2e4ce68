const dark = matchMedia("(prefers-color-scheme: dark)")
const paint = () => {
  const colors = dark.matches
    ? {ink: "#e6e9ee", line: "#3a4452", blue: "#56B4E9", red: "#E69F00"}
    : {ink: "#1d2430", line: "#d9dde3", blue: "#0072B2", red: "#D55E00"}
  for (const [model, property, kind] of painted) model[property] = colors[kind]
}
dark.addEventListener("change", paint)
paint()
