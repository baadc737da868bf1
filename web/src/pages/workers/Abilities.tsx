/** Shows how many of a fleet's workers can run each of its workflows, and which items the others
 * lack. */

import { Link } from "wouter"
import type { Matrix } from "@/api/schema"
import { Badge, StateIcon } from "@/ui"
import { words } from "@/words/en/workers"
import { type Ability, abilitiesOf } from "./machines"

interface AbilitiesProps {
  matrix: Matrix | undefined
  fleet: string
  workflows: readonly string[]
}

export function Abilities({ matrix, fleet, workflows }: AbilitiesProps) {
  if (workflows.length === 0) return <p className="workers-able faint">{words.noWorkflows}</p>
  const abilities = matrix && abilitiesOf(matrix, fleet, workflows)
  const [first] = abilities ?? []
  return (
    <ul className="workers-able">
      {first && first.online === 0 && <li className="workers-nobody">{words.nobodyTakes(first.draining)}</li>}
      {abilities?.map((ability) => (
        <li key={ability.workflow}>
          <Chip ability={ability} />
        </li>
      )) ?? workflows.map((workflow) => <li key={workflow}>{<span className="chip">{workflow}</span>}</li>)}
    </ul>
  )
}

function Chip({ ability }: { ability: Ability }) {
  const { workflow, able, online } = ability
  const isStuck = online > 0 && able === 0 && ability.unknown < online
  return (
    <Link
      href={`/console/workflows/${encodeURIComponent(workflow)}`}
      className={isStuck ? "chip workers-stuck" : "chip"}
    >
      {isStuck && <StateIcon state="failed" size={13} />}
      {workflow} {online > 0 && <Badge>{words.able(able, online)}</Badge>}
      {able < online && <span className="workers-lack">{missingText(ability)}</span>}
    </Link>
  )
}

function missingText({ everywhere, first, unknown }: Ability): string {
  if (everywhere) return words.missingEverywhere(everywhere)
  if (first) return words.lacks(first.worker, first.what, first.more)
  return unknown > 0 ? words.notTold(unknown) : ""
}
