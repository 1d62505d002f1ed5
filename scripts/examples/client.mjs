// A client of oDriver in JavaScript, written from ipc/PROTOCOL.md: streams one completion to stdout.
//
//   npm install zeromq@6 @msgpack/msgpack@3
//   node client.mjs "Once upon a time"                                                  the default socket
//   node client.mjs "Once upon a time" --max-tokens 64 --connect tcp://gpu1:7777 --key alice.key
import { readFileSync } from "node:fs"
import { parseArgs } from "node:util"
import { decode, encode } from "@msgpack/msgpack"
import { Dealer } from "zeromq"

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { connect: { type: "string" }, key: { type: "string" }, "max-tokens": { type: "string", default: "64" } },
})
const runtime = process.env.XDG_RUNTIME_DIR
const address = values.connect ?? `ipc://${runtime ? `${runtime}/odriver` : `/tmp/odriver-${process.getuid()}`}/odriver.sock`

const socket = new Dealer({ linger: 1000 })
if (values.key) {
  const lines = [...readFileSync(values.key, "utf8").matchAll(/^(\w+) = "(.*)"$/gm)]
  const key = Object.fromEntries(lines.map((line) => line.slice(1)))
  socket.curvePublicKey = key.public
  socket.curveSecretKey = key.secret
  socket.curveServerKey = key.server
}
socket.connect(address)
const send = (type, fields = {}) => socket.send(encode({ type, ...fields }))

let credit // messages that the daemon may send before it has to be told that some were read
let read = 0
await send("hello", { version: 6 })
for await (const [frame] of socket) {
  const message = decode(frame)
  switch (message.type) {
    case "welcome":
      credit = message.credits
      const params = { max_tokens: Number(values["max-tokens"]) }
      await send("generate", { request_id: "1", prompt: positionals[0], params })
      break
    case "ping":
      await send("pong")
      break
    case "token":
      process.stdout.write(message.text)
      if (++read === credit / 2) {
        await send("credit", { request_id: "1", count: read })
        read = 0
      }
      break
    case "done":
      process.stdout.write(`${message.text}\n`)
      socket.close()
      break
    case "error":
      console.error(`${message.code}: ${message.message}`)
      process.exitCode = 1
      socket.close()
  }
}
