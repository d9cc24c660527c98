// Calls on a clock, from a program that costs little beside what it measures. It knows neither protos nor scenarios:
// who starts it says when which bytes go to which method, and reads what came back.
//
// Input (-calls), little endian, in the order in which calls are due:
//
//	float64 due, seconds | uint8 method, its place among -method | uint32 length | request
//
// Output (-answers), one for each call, in the same order:
//
//	float64 sent, seconds | float64 latency, seconds from due | uint8 gRPC status, 255: not sent | uint32 length | answer
//
// Every call has a goroutine; those due while -in-flight are open are not sent. Kept answers are those of OK.
// With -closed N the clock is not looked at: N callers take the next call whenever they have an answer, for -for, and
// latency is from when a call was sent.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const notSent = 255

type call struct {
	due     float64
	method  uint8
	request []byte
	sent    float64
	latency float64
	status  uint8
	answer  []byte
}

// bytesAsTheyAre sends requests that are serialised already, and leaves answers so.
type bytesAsTheyAre struct{}

func (bytesAsTheyAre) Name() string                  { return "proto" }
func (bytesAsTheyAre) Marshal(v any) ([]byte, error) { return v.([]byte), nil }
func (bytesAsTheyAre) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

type methods []string

func (m *methods) String() string        { return fmt.Sprint(*m) }
func (m *methods) Set(name string) error { *m = append(*m, name); return nil }

func main() {
	log.SetFlags(0)
	var names methods
	target := flag.String("target", "127.0.0.1:50050", "host:port")
	calls := flag.String("calls", "", "file of what to send")
	answers := flag.String("answers", "", "file of what came back")
	timeout := flag.Duration("timeout", time.Second, "deadline of each call")
	inFlight := flag.Int64("in-flight", 10_000, "calls that may be open at once")
	closed := flag.Int("closed", 0, "callers that wait for each answer; 0: calls on the clock")
	lasts := flag.Duration("for", time.Minute, "how long -closed callers go on")
	connections := flag.Int("connections", 32, "TCP connections, taken in turns")
	ca := flag.String("ca", os.Getenv("FRESHET_TLS_CA"), "PEM file of the CA that signed the target's certificate")
	flag.Var(&names, "method", "full method name, /package.Service/Method; may be given again")
	flag.Parse()

	planned, err := read(*calls, len(names))
	if err != nil {
		log.Fatalf("-calls=%s: %v", *calls, err)
	}
	clients, err := dial(*target, *ca, *connections)
	if err != nil {
		log.Fatalf("-target=%s: %v", *target, err)
	}
	to := sender{clients, names, *timeout, os.Getenv("FRESHET_API_KEY"), time.Now()}
	if *closed > 0 {
		to.inTurns(planned, *closed, *lasts)
	} else {
		to.onTheClock(planned, *inFlight)
	}
	if err := write(*answers, planned); err != nil {
		log.Fatalf("-answers=%s: %v", *answers, err)
	}
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", seconds(used.Utime)+seconds(used.Stime))
}

type sender struct {
	clients []*grpc.ClientConn
	names   []string
	timeout time.Duration
	key     string
	began   time.Time
}

func (s sender) onTheClock(planned []call, most int64) {
	var open atomic.Int64
	var running sync.WaitGroup
	for place := range planned {
		one := &planned[place]
		if wait := one.due - time.Since(s.began).Seconds(); wait > 0 {
			time.Sleep(time.Duration(wait * float64(time.Second)))
		}
		if open.Load() >= most {
			one.status = notSent
			continue
		}
		open.Add(1)
		running.Add(1)
		go func() {
			defer running.Done()
			defer open.Add(-1)
			s.send(one, place)
		}()
	}
	running.Wait()
}

func (s sender) inTurns(planned []call, callers int, lasts time.Duration) {
	var next atomic.Int64
	var running sync.WaitGroup
	for range callers {
		running.Add(1)
		go func() {
			defer running.Done()
			for place := next.Add(1) - 1; int(place) < len(planned); place = next.Add(1) - 1 {
				one := &planned[place]
				if time.Since(s.began) > lasts {
					one.status = notSent
					continue
				}
				one.due = time.Since(s.began).Seconds()
				s.send(one, int(place))
			}
		}()
	}
	running.Wait()
}

// send makes one call, and notes when it left, how long it took from when it was due, and what came back.
func (s sender) send(one *call, place int) {
	ctx, cancel := context.WithTimeout(context.Background(), s.timeout)
	defer cancel()
	if s.key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.key)
	}
	one.sent = time.Since(s.began).Seconds()
	err := s.clients[place%len(s.clients)].Invoke(ctx, s.names[one.method], one.request, &one.answer)
	one.latency = time.Since(s.began).Seconds() - one.due
	one.status = uint8(status.Code(err))
}

func dial(target, ca string, number int) ([]*grpc.ClientConn, error) {
	transport := insecure.NewCredentials()
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", ca)
		}
		transport = credentials.NewTLS(&tls.Config{RootCAs: pool})
	}
	clients := make([]*grpc.ClientConn, number)
	for place := range clients {
		client, err := grpc.NewClient(target, grpc.WithTransportCredentials(transport),
			grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesAsTheyAre{}), grpc.WaitForReady(true)))
		if err != nil {
			return nil, err
		}
		client.Connect()
		clients[place] = client
	}
	return clients, nil
}

func read(path string, methods int) ([]call, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	from := bufio.NewReaderSize(file, 1<<20)
	var planned []call
	var head [13]byte
	for {
		if _, err := io.ReadFull(from, head[:]); errors.Is(err, io.EOF) {
			return planned, nil
		} else if err != nil {
			return nil, err
		}
		one := call{due: math.Float64frombits(binary.LittleEndian.Uint64(head[:])), method: head[8]}
		if int(one.method) >= methods {
			return nil, fmt.Errorf("call %d has method %d; allowed: less than %d", len(planned), one.method, methods)
		}
		one.request = make([]byte, binary.LittleEndian.Uint32(head[9:]))
		if _, err := io.ReadFull(from, one.request); err != nil {
			return nil, err
		}
		planned = append(planned, one)
	}
}

func write(path string, done []call) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	to := bufio.NewWriterSize(file, 1<<20)
	var head [21]byte
	for _, one := range done {
		binary.LittleEndian.PutUint64(head[:], math.Float64bits(one.sent))
		binary.LittleEndian.PutUint64(head[8:], math.Float64bits(one.latency))
		head[16] = one.status
		binary.LittleEndian.PutUint32(head[17:], uint32(len(one.answer)))
		if _, err := to.Write(head[:]); err != nil {
			return err
		}
		if _, err := to.Write(one.answer); err != nil {
			return err
		}
	}
	if err := to.Flush(); err != nil {
		return err
	}
	return file.Close()
}

func seconds(time syscall.Timeval) float64 { return float64(time.Sec) + float64(time.Usec)/1e6 }
