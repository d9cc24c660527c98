{{/* What a process that was taken over may do: nothing as root, write nowhere but in memory at /tmp. */}}
{{- define "freshet.podSecurity" -}}
automountServiceAccountToken: false
# The names of Services become variables otherwise: FRESHET_GATEWAY_PORT=tcp://..., KAFKA_PORT, REDIS_PORT.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "freshet.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ . }}
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "freshet.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Another node than the next pod of the same kind, where there is one: a dict as of freshet.labels. */}}
{{- define "freshet.apart" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "freshet.labels" . | nindent 14 }}
{{- end }}

{{/* Where the parts of a stack are, and who this process is to them: variables beside those of compose. */}}
{{- define "freshet.connections" -}}
{{- with .Values.kafka }}
{{- if not .inside }}
- {name: FRESHET_KAFKA_BOOTSTRAP, value: {{ .bootstrap | quote }}}
- {name: FRESHET_KAFKA_SECURITY, value: {{ .security }}}
{{- if .user }}
- {name: FRESHET_KAFKA_MECHANISM, value: {{ .mechanism }}}
- {name: FRESHET_KAFKA_USER, value: {{ .user | quote }}}
- {name: FRESHET_KAFKA_PASSWORD_FILE, value: /var/lib/freshet/kafka/password}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.redis.secret }}
- {name: FRESHET_REDIS_URL, valueFrom: {secretKeyRef: {name: {{ . }}, key: url}}}
{{- end }}
{{- if .Values.tls.secret }}
- {name: FRESHET_TLS_CERT, value: /var/lib/freshet/tls/tls.crt}
- {name: FRESHET_TLS_KEY, value: /var/lib/freshet/tls/tls.key}
- {name: FRESHET_TLS_CA, value: /var/lib/freshet/tls/ca.crt}
{{- end }}
{{- end }}

{{- define "freshet.connectionMounts" -}}
{{- if .Values.kafka.secret }}
- {name: kafka, mountPath: /var/lib/freshet/kafka, readOnly: true}
{{- end }}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /var/lib/freshet/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "freshet.connectionVolumes" -}}
{{- with .Values.kafka.secret }}
- {name: kafka, secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: password, path: password}]}}
{{- end }}
{{- with .Values.tls.secret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{/* The bundle, or the text bundle, read only: a dict with name, from (`bundle` or `text` of the values). */}}
{{- define "freshet.bundleMount" -}}
{name: {{ .name }}, mountPath: /{{ .name }}, readOnly: true{{ with .from.folder }}, subPath: {{ . | quote }}{{ end }}}
{{- end }}
