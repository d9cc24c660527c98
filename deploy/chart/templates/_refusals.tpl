{{/*
What values.schema.json cannot say in words: values that contradict each other. As everywhere in Freshet, a refusal
names the setting, its value and what is allowed. It renders nothing.
*/}}
{{- define "freshet.refusals" -}}
{{- $refused := list -}}
{{- if not .Values.bundle.volume -}}
{{- $refused = append $refused "bundle.volume={} allowed: a volume with the model bundle, like {persistentVolumeClaim: {claimName: models}}" -}}
{{- end -}}
{{- if and .Values.text.folder (not .Values.text.volume) -}}
{{- $refused = append $refused (printf "text.folder=%q allowed: beside text.volume; without, empty" .Values.text.folder) -}}
{{- end -}}
{{- if not .Values.keys.secret -}}
{{- $refused = append $refused "keys.secret=\"\" allowed: the name of a Secret with api-keys.json, pseudonym-key and signing-key" -}}
{{- end -}}

{{- with .Values.kafka -}}
{{- if and .inside .bootstrap -}}
{{- $refused = append $refused (printf "kafka.bootstrap=%q allowed: beside kafka.inside=false; with a broker inside, empty" .bootstrap) -}}
{{- else if not (or .inside .bootstrap) -}}
{{- $refused = append $refused "kafka.bootstrap=\"\" allowed: host:port of your brokers, with commas between; or kafka.inside=true" -}}
{{- end -}}
{{- if and .inside (or .user .secret (ne .security "PLAINTEXT")) -}}
{{- $refused = append $refused (printf "kafka.security=%q, kafka.user=%q, kafka.secret=%q allowed: beside kafka.inside=false; the broker inside speaks plaintext" .security .user .secret) -}}
{{- else if and (hasPrefix "SASL" .security) (not (and .user .secret)) -}}
{{- $refused = append $refused (printf "kafka.user=%q, kafka.secret=%q allowed: both, beside kafka.security=%q" .user .secret .security) -}}
{{- else if and (not (hasPrefix "SASL" .security)) (or .user .secret) -}}
{{- $refused = append $refused (printf "kafka.user=%q, kafka.secret=%q allowed: neither, beside kafka.security=%q" .user .secret .security) -}}
{{- end -}}
{{- if and (eq .mechanism "PLAIN") (eq .security "SASL_PLAINTEXT") -}}
{{- $refused = append $refused "kafka.mechanism=\"PLAIN\" allowed: beside kafka.security=\"SASL_SSL\", since it sends the password" -}}
{{- end -}}
{{- end -}}

{{- with .Values.redis -}}
{{- if and .inside .secret -}}
{{- $refused = append $refused (printf "redis.secret=%q allowed: beside redis.inside=false; with a Redis inside, empty" .secret) -}}
{{- else if not (or .inside .secret) -}}
{{- $refused = append $refused "redis.secret=\"\" allowed: the name of a Secret with your Redis' address under url; or redis.inside=true" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.inferenceServer.cards (not .Values.inferenceServer.enabled) -}}
{{- $refused = append $refused (printf "inferenceServer.cards=%v allowed: beside inferenceServer.enabled=true; without, 0" .Values.inferenceServer.cards) -}}
{{- end -}}

{{- range $process, $own := .Values.processes -}}
{{- if kindIs "map" $own.replicas -}}
{{- if gt (int $own.replicas.min) (int $own.replicas.max) -}}
{{- $refused = append $refused (printf "processes.%s.replicas.min=%v allowed: at most processes.%s.replicas.max=%v" $process $own.replicas.min $process $own.replicas.max) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $ours := `_(PORT|HOST|ADDRESS|ADDRESSES|BOOTSTRAP|URL|FILE|BUNDLE|TEXT|ENGINE|SHARD|DRAIN_SECONDS|CONNECTION_SECONDS|API_KEYS|SECURITY|MECHANISM|USER|CERT|KEY|CA|CHECKPOINTS)$` -}}
{{- $places := dict "settings" .Values.settings -}}
{{- range $process, $own := .Values.processes -}}
{{- $_ := set $places (printf "processes.%s.settings" $process) $own.settings -}}
{{- end -}}
{{- range $place, $settings := $places -}}
{{- range $name, $value := $settings -}}
{{- if and (hasPrefix "FRESHET_" $name) (regexMatch $ours $name) -}}
{{- $refused = append $refused (printf "%s.%s allowed: nowhere, since the chart sets it from other values" $place $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- with .Values.retraining -}}
{{- if and .schedule (not .claim) -}}
{{- $refused = append $refused (printf "retraining.claim=\"\" allowed: the name of a PersistentVolumeClaim, beside retraining.schedule=%q" .schedule) -}}
{{- else if and .claim (not .schedule) -}}
{{- $refused = append $refused (printf "retraining.schedule=\"\" allowed: when to run, beside retraining.claim=%q" .claim) -}}
{{- end -}}
{{- end -}}

{{- if $refused -}}
{{- fail (printf "\nthe values contradict each other:\n  %s" (join "\n  " $refused)) -}}
{{- end -}}
{{- end }}
