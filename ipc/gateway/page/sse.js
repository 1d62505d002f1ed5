// Server-sent events out of the body of a fetch.

/** A stream that ended before its end. */
export class BrokenOff extends Error {}

/** The data of each event as it comes; comments, such as pings, are passed over. */
export async function* eventData(body) {
  let rest = "";
  let data = [];
  for await (const text of chunks(body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + text).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

/** Not every browser can iterate over a stream yet. What fails here is the connection. */
async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(brokenOff);
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => null); // it may have failed already
  }
}

function brokenOff(error) {
  throw error.name === "AbortError" ? error : new BrokenOff("broken off", { cause: error });
}
