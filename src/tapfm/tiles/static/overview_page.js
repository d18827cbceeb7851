const field = document.querySelector("input");
field.addEventListener("input", () => {
  const wanted = field.value.toLowerCase();
  for (const figure of document.querySelectorAll("figure")) {
    figure.hidden = !figure.textContent.toLowerCase().includes(wanted);
  }
});
